"""Builds the report as one page of HTML that loads and runs nothing."""

from __future__ import annotations

from html import escape

from ddpshim.observe.report.charts import Chart, charts
from ddpshim.observe.report.findings import Remark, findings, verdict
from ddpshim.observe.report.run import Run
from ddpshim.observe.report.tables import Table, headline, tables
from ddpshim.observe.report.words import clock
from ddpshim.version import __version__

_LIGHT = """
  --paper: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #56606e; --faint: #d4d9e0; --line: #e2e6eb;
  --good: #1a7f4b; --note: #9a6700; --bad: #c6303e;
  --rank0: #0068b5; --rank1: #d2540a; --rank2: #0b8a62; --rank3: #b0489b; --rank4: #a67c00; --rank5: #3d8fd1;
  --rank6: #6a51a3; --rank7: #7a5230;
  --part0: #f0a35e; --part1: #8db9e8; --part2: #9fd3b4; --part3: #d9a0c4; --part4: #c9ced6;
"""
_DARK = """
  --paper: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #a4aebb; --faint: #3a4452; --line: #2b3440;
  --good: #4cc38a; --note: #e2b03c; --bad: #ff6b78;
  --rank0: #58aef0; --rank1: #ff9552; --rank2: #3fcf9e; --rank3: #e58bd0; --rank4: #e6c04a; --rank5: #9bd0ff;
  --rank6: #b3a0ee; --rank7: #cfa17a;
  --part0: #a8622a; --part1: #35659a; --part2: #35765a; --part3: #84497a; --part4: #555f6d;
"""
_STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .8rem; }}
p {{ margin: .3rem 0; }}
.soft {{ color: var(--soft); font-size: .875rem; }}
.verdict {{ display: flex; gap: .7rem; align-items: baseline; margin: 1rem 0; padding: .8rem 1rem; border-radius: .5rem;
  background: var(--card); border-left: .35rem solid var(--level); font-weight: 600; overflow-wrap: anywhere; }}
.level {{ color: var(--level); font-weight: 700; font-size: .8rem; letter-spacing: .03em; white-space: nowrap; }}
.good {{ --level: var(--good); }} .note {{ --level: var(--note); }} .bad {{ --level: var(--bad); }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr)); gap: .6rem; margin: 0; }}
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
figure svg {{ display: block; width: 100%; height: auto; font-family: inherit; }}
figcaption {{ font-size: .875rem; color: var(--soft); }}
figcaption strong {{ color: var(--ink); font-weight: 600; }}
details {{ border-bottom: 1px solid var(--line); padding: .5rem 0; }}
summary {{ cursor: pointer; font-weight: 600; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; margin: .5rem 0; min-width: 50%; }}
th, td {{ text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  font-variant-numeric: tabular-nums; }}
th {{ color: var(--soft); font-weight: 600; white-space: nowrap; }}
td.long {{ overflow-wrap: anywhere; min-width: 14rem; }}
a {{ color: inherit; }}
@media (max-width: 30rem) {{ body {{ padding: 1rem .7rem 2rem; }} figure {{ padding: .6rem; }}
  ul.findings li {{ grid-template-columns: 1fr; }} }}
@media print {{ :root {{ {_LIGHT} }} body {{ padding: 0; font-size: 11px; max-width: none; }}
  .charts {{ grid-template-columns: 1fr 1fr; }} figure, .verdict, dl div {{ border: 1px solid var(--line); }}
  details::details-content {{ content-visibility: visible; block-size: auto; }} }}
"""
_LONG = 40
_MARKS = {"good": "✓ fine", "note": "• note", "bad": "! look"}


def html(run: Run) -> str:
    """The page. Raises ReportError where matplotlib is not installed."""
    ended, pictures, made = verdict(run), charts(run), tables(run)
    named = {table.name for table in made}
    place = run.folder.resolve()
    name = escape(place.name)
    began, ended_at = clock(run.starts[0].began), clock(run.last.ended)
    when = f"{place.parent.name}/{place.name}, begun {began}, last word {ended_at} (UTC)"
    numbers = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in headline(run))
    looks = "".join(f'<li class="{each.level}">{_sentence(each)}</li>' for each in findings(run))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Run {name}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>Run {name}</h1>
<p class="soft">{escape(when)}</p>
<p class="verdict {ended.level}">{_sentence(ended)}</p>
</header>
<main>
<section aria-label="Key numbers"><dl>{numbers}</dl></section>
<section><h2>What to look at</h2>
<ul class="findings">{looks}</ul></section>
<section><h2>Charts</h2>
<div class="charts">{"".join(_figure(chart, named) for chart in pictures)}</div></section>
<section><h2>Tables</h2>
{"".join(map(_table, made))}</section>
</main>
<footer class="soft"><p>Written by ddpshim {escape(__version__)}.</p></footer>
</body>
</html>
"""


def _sentence(finding: Remark) -> str:
    return f'<span class="level">{_MARKS[finding.level]}</span><span>{escape(finding.text)}.</span>'


def _figure(chart: Chart, named: set[str]) -> str:
    link = f' <a href="#{chart.table}">The numbers</a>.' if chart.table in named else ""
    return (
        f'<figure role="group" aria-label="{escape(chart.title)}"><h3>{escape(chart.title)}</h3>'
        f'<div role="img" aria-label="{escape(chart.says)}">{chart.svg}</div>'
        f"<figcaption><strong>{escape(chart.says)}</strong> {escape(chart.how_to_read)}{link}</figcaption></figure>"
    )


def _cell(text: str) -> str:
    is_long = ' class="long"' if len(text) > _LONG else ""
    return f"<td{is_long}>{escape(text)}</td>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    is_open = " open" if len(table.rows) <= 12 else ""
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<details id="{table.name}"{is_open}><summary>{escape(table.title)}</summary>{note}'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>\n"
    )
