"""The one HTML file around drawings, tables and texts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --soft: #57606a; --rule: #d0d7de; --band: #ddf4ff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1; --rule: #3d444d; --band: #12304f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 780px; padding: 16px; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .4rem 0; }
.soft, footer { color: var(--soft); font-size: .875rem; }
.bad { border-left: 4px solid #d1242f; padding-left: 12px; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 10px; margin: 1rem 0; }
.answers div { border: 1px solid var(--rule); border-radius: 8px; padding: 8px 12px; }
.answers b { display: block; font-size: 1.3rem; line-height: 1.3; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; }
th { font-weight: 600; color: var(--soft); }
td:first-child, .figures td:nth-child(2) { white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .8rem; padding-left: 8%; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; }
code { font-size: .85em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
.grid { stroke: var(--rule); fill: none; }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; fill: none; }
.band { fill: var(--band); }
.narrow { display: none; }
@media (max-width: 560px) {
  .wide { display: none; } .narrow { display: block; }
  .figures td:first-child { white-space: normal; } .how { display: none; }
}
@media print { body { max-width: none; } h2 { break-after: avoid; } svg, tr { break-inside: avoid; } }
"""


def page(title: str, sections: Sequence[str], footer: str) -> str:
    """A whole document; `sections` are HTML already."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n<footer><p>{escape(footer)}</p></footer>\n</body></html>\n"
    )


def answers(pairs: Sequence[tuple[str, str, str]]) -> str:
    """Large numbers with what they are: (name, value, remark)."""
    return '<div class="answers">' + "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><span class=\"soft\">{escape(remark)}</span></div>"
        for name, value, remark in pairs
    ) + "</div>"  # fmt: skip


def section(title: str, html: str, remark: str = "") -> str:
    """A heading, a remark in plain text, and HTML."""
    words = f'<p class="soft">{escape(remark)}</p>' if remark else ""
    return f"<section><h2>{escape(title)}</h2>{words}{html}</section>"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, how: int | None = None) -> str:
    """A table of plain texts; column `how` is left out on narrow screens."""

    def cells(kind: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=how' if index == how else ''}>{escape(text)}</{kind}>" for index, text in enumerate(texts)
        )

    head = f"<tr>{cells('th', titles)}</tr>" if any(titles) else ""
    kind = ' class="figures"' if how is not None else ""
    return f"<table{kind}>" + head + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</table>"
