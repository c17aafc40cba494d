"""Builds the report as one HTML page, complete except for videos."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Callable

from ddpshim.errors import ReportError
from ddpshim.job.say import count
from ddpshim.observe.report.charts_of_ranks import of_ranks
from ddpshim.observe.report.charts_of_results import of_results
from ddpshim.observe.report.comparing import named, tables_of
from ddpshim.observe.report.figures import COLOURS, Chart
from ddpshim.observe.report.findings import Remark, findings, verdict
from ddpshim.observe.report.results import videos
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.tables import Table, headline, tables
from ddpshim.observe.report.words import clock
from ddpshim.version import __version__

_LIGHT = """
  --paper: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #56606e; --faint: #d4d9e0; --line: #e2e6eb;
  --good: #1a7f4b; --note: #9a6700; --bad: #c6303e; --shade: #aab2bd;
"""
_DARK = """
  --paper: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #a4aebb; --faint: #3a4452; --line: #2b3440;
  --good: #4cc38a; --note: #e2b03c; --bad: #ff6b78; --shade: #5b6878;
"""
_STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .8rem; }}
p {{ margin: .3rem 0; overflow-wrap: anywhere; }}
.soft {{ color: var(--soft); font-size: .875rem; }}
.verdict {{ display: flex; gap: .7rem; align-items: baseline; margin: 1rem 0; padding: .8rem 1rem; border-radius: .5rem;
  background: var(--card); border-left: .35rem solid var(--level); font-weight: 600; overflow-wrap: anywhere; }}
.level {{ color: var(--level); font-weight: 700; font-size: .8rem; letter-spacing: .03em; white-space: nowrap; }}
.good {{ --level: var(--good); }} .note {{ --level: var(--note); }} .bad {{ --level: var(--bad); }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .6rem; margin: 0; }}
dl div {{ background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }}
dt {{ color: var(--soft); font-size: .8rem; }}
dd {{ margin: 0; font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }}
ul.findings {{ list-style: none; margin: 0; padding: 0; }}
ul.findings li {{ display: grid; grid-template-columns: 4.2rem 1fr; padding: .45rem 0;
  border-bottom: 1px solid var(--line);
  align-items: baseline; overflow-wrap: anywhere; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .9rem; background: var(--card); border-radius: .5rem; min-width: 0;
  break-inside: avoid; }}
figure h3 {{ font-size: 1rem; margin: 0 0 .4rem; }}
.chart text {{ fill: var(--ink) !important; }} .chart .bartext {{ fill: #fff !important; }}
.chart :is(.gridlayer path, .zerolinelayer path, .crisp) {{ stroke: var(--faint) !important; }}
.chart .hoverlayer .bg {{ fill: var(--paper) !important; fill-opacity: 1 !important; }}
.chart :is(.hovertext path, .hovertext rect) {{ fill: var(--paper) !important; stroke: var(--faint) !important; }}
.chart .updatemenu-item-rect {{ fill: var(--paper) !important; fill-opacity: 1 !important;
  stroke: var(--faint) !important; }}
video {{ display: block; width: 100%; border-radius: .3rem; background: #000; }}
.videos {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr)); gap: 1rem; }}
.run p {{ flex-wrap: wrap; }} .run i {{ display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; }}
figcaption {{ font-size: .875rem; color: var(--soft); }}
figcaption strong {{ color: var(--ink); font-weight: 600; }}
details {{ border-bottom: 1px solid var(--line); padding: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
.scroll {{ overflow-x: auto; /* the shadow at an edge says that there is more to scroll to */
  background: linear-gradient(to right, var(--paper) 40%, transparent) 0 0 / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 40%, transparent) 100% 0 / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) 0 0 / .9rem 100% no-repeat,
  linear-gradient(to left, var(--shade), transparent) 100% 0 / .9rem 100% no-repeat; }}
table {{ border-collapse: collapse; font-size: .875rem; margin: .5rem 0; min-width: 50%; }}
th, td {{ text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; }}
th {{ color: var(--soft); font-weight: 600; vertical-align: bottom; }}
td {{ white-space: nowrap; }} td.long {{ white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }}
a {{ color: inherit; }}
@media (max-width: 30rem) {{ body {{ padding: 1rem .7rem 2rem; }} figure {{ padding: .6rem; }}
  ul.findings li {{ grid-template-columns: 1fr; }}
  :is(#values, #differences) :is(th, td) {{ white-space: normal; overflow-wrap: anywhere; min-width: 5.6rem; }} }}
@media print {{ :root {{ {_LIGHT} }} body {{ padding: 0; font-size: 11px; max-width: none; }}
  .charts {{ grid-template-columns: 1fr 1fr; }} figure, .verdict, dl div {{ border: 1px solid var(--line); }}
  details::details-content {{ content-visibility: visible; block-size: auto; }} }}
"""
_LONG = 40
_HOW = """<p class="soft">Charts: point for values, drag to zoom, double-click to zoom out, click a name to hide it.</p>
"""
_MARKS = {"good": "✓ fine", "note": "• note", "bad": "! look"}
_REFRESH_S = 5
_MOST_VIDEOS = 4  # that are shown; the others are links

# Draws the charts. A live page also fetches itself every few seconds, and replaces what has changed.
_SCRIPT = r"""
const isTouch = !matchMedia("(hover: hover)").matches;
const config = {
  responsive: true, displaylogo: false, displayModeBar: isTouch ? false : "hover",
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
};
function draw(page) {
  const figures = JSON.parse(page.getElementById("figures").textContent);
  for (const [name, figure] of Object.entries(figures)) {
    if (isTouch) figure.layout.dragmode = false;
    const menu = (document.getElementById(name).layout?.updatemenus || [])[0];
    if (menu) {  // keep the chosen metric
      figure.layout.updatemenus[0].active = menu.active;
      figure.data.forEach((trace, i) => { trace.visible = i == menu.active; });
    }
    Plotly.react(name, figure.data, figure.layout, config);
  }
}
draw(document);
const parts = page => [...page.querySelectorAll(".chart, [data-part]")];
const before = Object.fromEntries(parts(document).map(part => [part.id, part.outerHTML]));
let last = new Date();
async function refresh() {
  const live = document.getElementById("live");
  let page;
  try {
    const answer = await fetch("part");
    if (!answer.ok) throw answer;
    page = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    live.textContent = `No answer since ${last.toLocaleTimeString()}: is \`ddpshim report --serve\` still running?`;
    return;
  }
  last = new Date();
  live.textContent = `Live, updated ${last.toLocaleTimeString()}`;
  if (parts(page).map(part => part.id).join() != parts(document).map(part => part.id).join()) return location.reload();
  for (const part of parts(page)) {
    const old = document.getElementById(part.id), text = part.outerHTML;
    if (part.className == "chart" || text == before[part.id]) continue;
    before[part.id] = text;
    part.open = old.open;
    old.replaceWith(part);
  }
  draw(page);
}
if (document.body.dataset.every) setInterval(refresh, 1000 * document.body.dataset.every);
"""


def html(runs: Sequence[Run], link: Callable[[Path], str], library: str, is_live: bool = False) -> str:
    """Return the page about one run, or a comparison of several.

    `link` returns the address of a video, `library` is the result of `plotly_js`. A live page requests "part" every few
    seconds: the same page without the library.
    """
    return _of_one(runs[0], link, is_live, library) if len(runs) == 1 else _of_several(runs, is_live, library)


def plotly_js() -> str:
    """Return plotly.js, which draws the charts. Raises ReportError if plotly cannot be imported."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(
            f"plotly cannot be imported ({error}); the page would have no charts. Install it with "
            "`pip install ddpshim[report]` (or `pip install plotly`), or use --markdown."
        ) from error
    return str(get_plotlyjs())


def _of_one(run: Run, link: Callable[[Path], str], is_live: bool, library: str) -> str:
    ended, made, results, ranks = verdict(run), tables(run), of_results({"": run}), of_ranks(run)
    tables_made = {table.name for table in made}
    when = f"began {clock(run.starts[0].began)}, last record {clock(run.last.ended)} (UTC)"
    numbers = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in headline(run))
    looks = "".join(f'<li class="{each.level}">{_sentence(each)}</li>' for each in findings(run))
    header = f"""<div id="head" data-part><p class="soft">{escape(when)}</p>
<p class="verdict {ended.level}">{_sentence(ended)}</p></div>"""
    main = f"""<section id="numbers" data-part aria-label="Key numbers"><dl>{numbers}</dl></section>
{_charts("Results", results, tables_made, _HOW)}
{_videos(videos(run), link)}
<section id="looks" data-part><h2>What to look at</h2><ul class="findings">{looks}</ul></section>
{_charts("Ranks and time", ranks, tables_made)}
<section><h2>Tables</h2>
{"".join(map(_table, made))}</section>"""
    return _document(run.name, header, main, [*results, *ranks], is_live, library)


def _of_several(runs: Sequence[Run], is_live: bool, library: str) -> str:
    by_name = named(runs)
    made, results = tables_of(by_name), of_results(by_name)
    rows = []
    for number, (name, run) in enumerate(by_name.items()):
        ended = verdict(run)
        swatch = f'<i style="background: {COLOURS[number % len(COLOURS)]}"></i>'
        rows.append(f'<p class="verdict {ended.level}">{swatch}<span>{escape(name)}</span>{_sentence(ended)}</p>')
    header = f'<div id="head" data-part class="run">{"".join(rows)}</div>'
    main = f"""{_section(made[0])}
{_charts("Results", results, {table.name for table in made}, _HOW)}
{"".join(_section(table) for table in made[1:] if table.name == "differences") or "<p>No setting differs.</p>"}
{"".join(_table(table) for table in made if table.name == "digits")}"""
    return _document(" against ".join(by_name), header, main, results, is_live, library)


def _document(title: str, header: str, main: str, charts: Sequence[Chart], is_live: bool, library: str) -> str:
    figures = json.dumps(_finite({chart.name: chart.figure for chart in charts})).replace("<", "\\u003c")
    scripts = [library, _SCRIPT]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    sources = f"script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; media-src 'self' file:"
    policy = f"default-src 'none'; {sources}" + ("; connect-src 'self'" if is_live else "")
    live = f'<p id="live" class="soft">Live, updated every {_REFRESH_S} s</p>' if is_live else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}: report</title>
<style>{_STYLE}</style>
</head>
<body{f' data-every="{_REFRESH_S}"' if is_live else ""}>
<header>
<h1>{escape(title)}</h1>
{live}{header}
</header>
<main>
{main}
</main>
<footer class="soft"><p>Written by ddpshim {escape(__version__)}. Charts: plotly.js (MIT licence).</p></footer>
<script type="application/json" id="figures">{figures}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def _finite(value: Any) -> Any:
    """Return `value` with None for NaN and infinity, which JSON lacks: a chart has a gap there."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sentence(finding: Remark) -> str:
    return f'<span class="level">{_MARKS[finding.level]}</span><span>{escape(finding.text)}.</span>'


def _charts(title: str, charts: Sequence[Chart], named: set[str], how: str = "") -> str:
    if not charts:
        return ""
    figures = "".join(_figure(chart, named) for chart in charts)
    return f'<section><h2>{title}</h2>{how}<div class="charts">{figures}</div></section>'


def _figure(chart: Chart, named: set[str]) -> str:
    link = f' <a href="#{chart.table}">The numbers</a>.' if chart.table in named else ""
    return (
        f'<figure role="group" aria-label="{escape(chart.title)}"><h3>{escape(chart.title)}</h3>'
        f'<div id="{chart.name}" class="chart" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<figcaption id="about-{chart.name}" data-part><strong>{escape(chart.says)}</strong> '
        f"{escape(chart.how_to_read)}{link}</figcaption></figure>"
    )


def _videos(found: Sequence[Path], link: Callable[[Path], str]) -> str:
    if not found:
        return ""
    shown = "".join(
        f'<figure><video controls preload="metadata" src="{escape(link(path))}"></video>'
        f'<figcaption><a href="{escape(link(path))}">{escape(path.name)}</a></figcaption></figure>'
        for path in found[:_MOST_VIDEOS]
    )
    rest = "".join(f'<li><a href="{escape(link(path))}">{escape(path.name)}</a></li>' for path in found[_MOST_VIDEOS:])
    more = f"<details><summary>{count(len(found) - _MOST_VIDEOS, 'older video')}</summary><ul>{rest}</ul></details>"
    inside = f'<div class="videos">{shown}</div>{more if rest else ""}'
    return f'<section id="videos" data-part><h2>Videos</h2>{inside}</section>'


def _cell(text: str) -> str:
    is_long = ' class="long"' if len(text) > _LONG else ""
    return f"<td{is_long}>{escape(text)}</td>"


def _section(table: Table) -> str:
    return f'<section id="{table.name}" data-part><h2>{escape(table.title)}</h2>{_content(table)}</section>\n'


def _table(table: Table) -> str:
    is_open = " open" if len(table.rows) <= 12 else ""
    summary = f"<summary>{escape(table.title)}</summary>"
    return f'<details id="{table.name}" data-part{is_open}>{summary}{_content(table)}</details>\n'


def _content(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return (
        f'{note}<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
