"""Rows of text under a header: what commands print, pages show and `print(result.table())` displays."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table; printed as aligned columns, the first to the left and the others to the right, `note` below them.

    >>> print(Table("Modes", ["mode", "γ"], [["1", "0.5"], ["2", "0.25"]]))
    Modes
    mode     γ
    1      0.5
    2     0.25
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [self.title]
        for first, *others in (self.header, *self.rows):
            cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
            lines.append("  ".join(cells))
        return "\n".join([*lines, self.note] if self.note else lines)
