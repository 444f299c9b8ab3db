"""What every HTML page of routeprof shares: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from routeprof.report.summary import plain

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --paper: #fff; --card: #f6f8fa; --error: #c0232c; --warning: #8a5a00; --info: #0969da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #0d1117; --card: #151b23; --error: #ff7b72; --warning: #e3b341; --info: #58a6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 50rem; }
.soft, small, figcaption, caption { color: var(--soft); }
.findings { list-style: none; margin: 1rem 0; padding: 0; }
.findings li { margin: .5rem 0; padding: .5rem .9rem; max-width: none; background: var(--card);
  border-left: 4px solid var(--tone); border-radius: 4px; }
.findings b { color: var(--tone); }
.error { --tone: var(--error); } .warning { --tone: var(--warning); } .info { --tone: var(--info); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .7rem;
  margin: 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem .8rem; }
.facts dt { color: var(--soft); font-size: .85rem; }
.facts dd { margin: 0; font-weight: 600; }
.facts small { display: block; font-weight: 400; line-height: 1.3; }
figure { margin: 1.2rem 0 2rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: 'DejaVu Sans', Verdana, sans-serif; }
figcaption, caption { font-size: .9rem; text-align: left; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { vertical-align: bottom; font-weight: 600; }
td { white-space: nowrap; }
td.text, th.text { text-align: left; overflow-wrap: anywhere; white-space: normal;
  min-width: 11rem; }
.meanings { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem;
  font-size: .9rem; }
.meanings dt { font-family: ui-monospace, monospace; } .meanings dd { margin: 0; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --paper: #fff;
  --card: #fff; --error: #a00; --warning: #740; --info: #048; }
  body { padding: 0; max-width: none; font-size: 11px; } .wide { overflow: visible; }
  table { font-size: 8px; } th, td { padding: .1rem .3rem; white-space: normal; }
  tr { break-inside: avoid; } }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, body: Iterable[str]) -> str:
    """A whole document, which loads nothing.

    Args:
        title: escaped already, as are the parts of the body.
    """
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
    )
    return head + "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"


def escaped(value: object) -> str:
    """Text for HTML, without characters that could steer what shows it."""
    return escape(plain(value))


def section(title: str, *parts: str) -> str:
    """A part of the page under a heading."""
    return f"<section><h2>{escaped(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def facts(found: Iterable[tuple[str, str, str]]) -> str:
    """Names, values and what they mean, as cards."""
    cards = "\n".join(
        f"<div><dt>{escaped(name)}</dt>"
        f"<dd>{escaped(value)} <small>{escaped(meaning)}</small></dd></div>"
        for name, value, meaning in found
    )
    return f'<dl class="facts">\n{cards}\n</dl>'


def table(headings: Sequence[str], lines: Sequence[Sequence[str]], texts: set[int]) -> str:
    """A table; ``texts`` are the columns that hold no numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        marks = ['class="text"' if number in texts else "" for number in range(len(cells))]
        pairs = zip(cells, marks, strict=True)
        inside = (f"<{f'{tag} {mark}'.strip()}>{escaped(cell)}</{tag}>" for cell, mark in pairs)
        return f"<tr>{''.join(inside)}</tr>"

    body = "\n".join(row(line, "td") for line in lines)
    head = row(headings, "th")
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )
