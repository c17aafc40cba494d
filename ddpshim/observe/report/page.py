"""Builds the report as one HTML page, complete in itself."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from ddpshim.errors import ReportError
from ddpshim.observe.report.charts import Chart
from ddpshim.observe.report.findings import Remark
from ddpshim.observe.report.tables import Table
from ddpshim.version import __version__

_LIGHT = """
  --paper: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #56606e; --faint: #d4d9e0; --line: #e2e6eb;
  --good: #1a7f4b; --note: #9a6700; --bad: #c6303e;
"""
_DARK = """
  --paper: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #a4aebb; --faint: #3a4452; --line: #2b3440;
  --good: #4cc38a; --note: #e2b03c; --bad: #ff6b78;
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
.verdict {{ margin: 1rem 0; padding: .8rem 1rem; border-radius: .5rem; font-weight: 600;
  background: var(--card); border-left: .35rem solid var(--level); }}
.level {{ color: var(--level); font-weight: 700; font-size: .8rem; margin-right: .7rem; white-space: nowrap; }}
.good {{ --level: var(--good); }} .note {{ --level: var(--note); }} .bad {{ --level: var(--bad); }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .6rem; margin: 0; }}
dl div {{ background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }}
dt {{ color: var(--soft); font-size: .8rem; }}
dd {{ margin: 0; font-weight: 600; overflow-wrap: anywhere; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem;
  margin-top: 2rem; }}
figure {{ margin: 0; padding: .9rem; background: var(--card); border-radius: .5rem; min-width: 0; }}
figure h3 {{ font-size: 1rem; margin: 0 0 .4rem; }}
figcaption {{ font-size: .875rem; color: var(--soft); }}
.chart text {{ fill: var(--ink) !important; }}
.chart :is(.gridlayer path, .zerolinelayer path, .crisp) {{ stroke: var(--faint) !important; }}
.chart .hoverlayer .bg {{ fill: var(--paper) !important; fill-opacity: 1 !important; }}
.chart :is(.hovertext path, .hovertext rect) {{ fill: var(--paper) !important; stroke: var(--faint) !important; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; margin: .5rem 0; min-width: 50%; }}
th, td {{ text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; }}
th {{ color: var(--soft); font-weight: 600; vertical-align: bottom; }}
td {{ white-space: nowrap; }} td.long {{ white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }}
@media print {{ :root {{ {_LIGHT} }} body {{ padding: 0; font-size: 11px; max-width: none; }} }}
"""
_LONG = 40
_MARKS = {"good": "✓ fine", "note": "• note", "bad": "! look"}
_SCRIPT = """
const isTouch = !matchMedia("(hover: hover)").matches;
const config = { responsive: true, displaylogo: false, displayModeBar: isTouch ? false : "hover" };
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [name, figure] of Object.entries(figures)) {
  if (isTouch) figure.layout.dragmode = false;
  Plotly.newPlot(name, figure.data, figure.layout, config);
}
"""


class Contents(NamedTuple):
    """What a report says, in its order. `verdicts` and `numbers` have a name each, "" for the verdict of one run."""

    title: str
    verdicts: list[tuple[str, Remark]]
    numbers: list[tuple[str, str]]
    findings: list[Remark]
    charts: list[Chart]
    tables: list[Table]


def html(contents: Contents, library: str) -> str:
    """Return the page; `library` is the result of `plotly_js`. Local."""
    figures = json.dumps(_finite({chart.name: chart.figure for chart in contents.charts})).replace("<", "\\u003c")
    scripts = [library, _SCRIPT]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    verdicts = "".join(_remark(remark, "verdict", name) for name, remark in contents.verdicts)
    numbers = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in contents.numbers)
    looks = "".join(_remark(finding, "finding") for finding in contents.findings)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(contents.title)}: report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(contents.title)}</h1>
{verdicts}
<dl>{numbers}</dl>
{f"<h2>What to look at</h2>{looks}" if looks else ""}
<div class="charts">{"".join(map(_figure, contents.charts))}</div>
{"".join(map(_table, contents.tables))}
<p class="soft">Written by ddpshim {escape(__version__)}. Charts: plotly.js (MIT licence); point for values, drag to
zoom, double-click to zoom out, click a name to hide it.</p>
<script type="application/json" id="figures">{figures}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""


def can_draw() -> bool:
    """Return whether plotly can be imported. Local."""
    with contextlib.suppress(ImportError):
        import plotly.offline  # noqa: F401

        return True
    return False


def plotly_js() -> str:
    """Return plotly.js, which draws the charts. Local. Raises ReportError if plotly cannot be imported."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ReportError(
            f"plotly cannot be imported ({error}); the page would have no charts. Install it with "
            "`pip install ddpshim[report]` (or `pip install plotly`), or use --markdown."
        ) from error
    return str(get_plotlyjs())


def _finite(value: Any) -> Any:
    """Return `value` with None for NaN and infinity, which JSON lacks: a chart has a gap there."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _remark(remark: Remark, kind: str, name: str = "") -> str:
    about = f"{escape(name)}: " if name else ""
    mark = f'<span class="level">{_MARKS[remark.level]}</span>'
    return f'<p class="{kind} {remark.level}">{mark}{about}{escape(remark.text)}.</p>\n'


def _figure(chart: Chart) -> str:
    return (
        f'<figure><h3>{escape(chart.title)}</h3><div id="{chart.name}" class="chart" role="img" '
        f'aria-label="{escape(chart.title)}: {escape(chart.says)}"></div>'
        f"<figcaption>{escape(chart.says)} {escape(chart.how_to_read)}</figcaption></figure>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2>{note}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(table.title)}"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n'
    )


def _cell(text: str) -> str:
    is_long = ' class="long"' if len(text) > _LONG else ""
    return f"<td{is_long}>{escape(text)}</td>"
