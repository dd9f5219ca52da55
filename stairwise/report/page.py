"""One self-contained HTML page: text, tables, figures and curves to explore; no network, light and dark."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
from numpy.typing import NDArray

from stairwise.files import plain, save_text

__all__ = ["Line", "Page", "Panel", "Picture", "Table"]

MOST_POINTS = 600  # a curve; more cannot be told apart on a screen


@dataclass(frozen=True, eq=False)
class Line:
    """A curve; `mode` (j, d) gives it the colour of mode j of d, otherwise it is drawn in the text colour."""

    name: str
    x: NDArray
    y: NDArray
    mode: tuple[int, int] | None = None
    dashed: bool = False
    legend: bool = True


@dataclass(frozen=True, eq=False)
class Panel:
    """An interactive chart; `marks` are vertical lines; `log` offers a logarithmic axis as well."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[float] = ()
    log: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under a header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG with words for those who cannot see it."""

    path: Path
    alt: str


@dataclass(frozen=True)
class Page:
    """What the page says, from top to bottom."""

    title: str
    lead: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    facts: dict[str, str] = field(default_factory=dict)

    def write(self, target: Path) -> None:
        """Render to one file."""
        from plotly.offline import get_plotlyjs

        charts = [_chart(panel) for panel in self.panels]
        template = Template(files("stairwise.report").joinpath("page.html").read_text(encoding="utf-8"))
        text = template.substitute(
            title=html.escape(self.title),
            lead=html.escape(self.lead),
            charts="\n".join(_frame(i, panel) for i, panel in enumerate(self.panels)),
            hint='<p class="hint">Drag to zoom, double-click to zoom out.</p>' if charts else "",
            tables="\n".join(_table(table) for table in self.tables),
            pictures="\n".join(_picture(picture) for picture in self.pictures),
            facts="\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in self.facts.items()),
            # "</" would end the script
            data=json.dumps(plain(charts), allow_nan=False).replace("</", "<\\/"),
            plotly=get_plotlyjs() if charts else "",
        )
        save_text(target, text)


def _frame(i: int, panel: Panel) -> str:
    title = html.escape(panel.title)
    toggle = f'<button type="button" data-log="{i}" aria-pressed="false">log scale</button>' if panel.log else ""
    chart = f'<div id="chart{i}" role="img" aria-label="{title}"></div>'
    return f'<section class="chart"><h2>{title}</h2>{toggle}{chart}</section>'


def _chart(panel: Panel) -> dict:
    return {
        "x": panel.x_label,
        "y": panel.y_label,
        "marks": [float(m) for m in panel.marks if np.isfinite(m)],
        "lines": [_line(line) for line in panel.lines],
    }


def _line(line: Line) -> dict:
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).round().astype(int))
    colors = _colors(*line.mode) if line.mode else {"light": "#1b2a41", "dark": "#e8eaf0"}
    return {
        "name": line.name,
        "x": [float(f"{v:.6g}") for v in x[keep]],
        "y": [float(f"{v:.6g}") for v in y[keep]],
        "dash": "dash" if line.dashed else "solid",
        "legend": line.legend,
        **colors,
    }


def _colors(j: int, d: int) -> dict[str, str]:
    """Colour of mode j of d on a light and on a dark page."""
    import matplotlib
    from matplotlib.colors import to_hex

    scale, share = matplotlib.colormaps["cividis"], j / max(d - 1, 1)
    return {"light": to_hex(scale(0.88 * share)), "dark": to_hex(scale(0.3 + 0.7 * share))}


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    title = html.escape(table.title)
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section><h2>{title}</h2><div class="scroll">{body}</div></section>'


def _picture(picture: Picture) -> str:
    code = base64.b64encode(picture.path.read_bytes()).decode()
    alt = html.escape(picture.alt, quote=True)
    return f'<figure><img src="data:image/png;base64,{code}" alt="{alt}"><figcaption>{alt}</figcaption></figure>'
