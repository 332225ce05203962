"""A table of measured numbers that are no times: errors, shares, a profiler's counters. Stored as ladders are.

Table("errors", {"ours": {"1K": 3.2e-4, "8K": 3.3e-4}, "theirs": {"1K": 4.1e-4}}, sources=("kernels/a.py",))
"""

import html
import numbers
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """{row: {column: number or text}}; a column that a row lacks stays empty. source: where stored ones come from."""

    title: str
    rows: dict
    sources: tuple = ()  # paths from the course's folder of the files that decide the numbers
    source: str = ""
    stale: bool = False

    @property
    def columns(self):
        """The columns of all rows, in the order in which they come."""
        return list(dict.fromkeys(column for row in self.rows.values() for column in row))

    def lines(self):
        """The headings and the rows, as lists of texts."""
        body = [[name, *(_text(row.get(column)) for column in self.columns)] for name, row in self.rows.items()]
        return [["", *self.columns], *body]

    def _caption(self):
        notes = [self.source] if self.source else []
        notes += ["stale: a source has changed since"] if self.stale else []
        return self.title + (f" ({'; '.join(notes)})" if notes else "")

    def __str__(self):
        lines = self.lines()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        shown = [" ".join(cell.ljust(width + 1) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([self._caption(), *shown])

    __repr__ = __str__

    def _repr_html_(self):
        first, *rest = self.lines()
        return html_table(self._caption(), first, rest)


def _text(value):
    """Three digits of a number; whole numbers and texts as they are."""
    if value is None:
        return ""
    if isinstance(value, numbers.Integral) or not isinstance(value, numbers.Real):
        return f"{value:,}" if isinstance(value, numbers.Integral) else str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def html_table(caption, headings, rows):
    """Texts as a table in HTML, for Jupyter. `align` and `nowrap` are old, and kept where style is dropped; style wins
    over the pages that align to the right."""
    look = 'align="left" nowrap style="text-align:left"'

    def row(cells, tag):
        return "<tr>" + "".join(f"<{tag} {look}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    caption = f'<caption align="left" style="text-align:left"><b>{html.escape(caption)}</b></caption>'
    body = "".join(row(r, "td") for r in rows)
    return f'<table style="font-size:85%">{caption}<thead>{row(headings, "th")}</thead><tbody>{body}</tbody></table>'
