"""One self-contained HTML page with text, tables, figures and interactive charts, in light and dark colours."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.files import plain, save_text
from stairwise.table import Table

MOST_POINTS = 600  # per curve; a screen cannot show more


@dataclass(frozen=True, eq=False)
class Line:
    """A curve, in the colour of mode j of d if `mode` is (j, d), otherwise in the text colour.

    `kind` is "line", "points" or "bars".
    """

    name: str
    x: NDArray
    y: NDArray
    mode: tuple[int, int] | None = None
    dashed: bool = False
    legend: bool = True
    kind: str = "line"


@dataclass(frozen=True, eq=False)
class Panel:
    """An interactive chart; `marks` are vertical lines, `spans` are shaded intervals of the horizontal axis, and `log`
    adds buttons for logarithmic and symmetric logarithmic axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[float] = ()
    log: bool = False
    spans: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Picture:
    """A PNG with its alternative text."""

    path: Path
    alt: str


@dataclass(frozen=True)
class Page:
    """The contents of a page, from top to bottom."""

    title: str
    lead: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    facts: dict[str, str] = field(default_factory=dict)

    def write(self, target: Path) -> None:
        """Write the page to one self-contained file."""
        from plotly.offline import get_plotlyjs

        plotly = f"<script>{get_plotlyjs()}</script>" if self.panels else ""
        save_text(target, self.render(plotly, live=False))

    def render(self, plotly: str, live: bool) -> str:
        """The HTML text; `plotly` is the element that loads the library; a live page reloads data.json."""
        parts = self.parts()
        template = Template(files("stairwise.report").joinpath("page.html").read_text(encoding="utf-8"))
        return template.substitute(
            {name: value for name, value in parts.items() if isinstance(value, str)},
            hint='<p class="hint">Drag to zoom, double-click to zoom out.</p>' if self.panels else "",
            pictures="\n".join(_picture(picture) for picture in self.pictures),
            # "</" would end the script
            data=json.dumps(parts["data"], allow_nan=False).replace("</", "<\\/"),
            plotly=plotly,
            live=json.dumps(live),
        )

    def parts(self) -> dict[str, Any]:
        """The parts that change during a run: HTML of title, lead, charts, tables and facts, and the charts' data."""
        facts = "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in self.facts.items())
        return {
            "title": html.escape(self.title),
            "lead": html.escape(self.lead),
            "charts": "\n".join(_frame(i, panel) for i, panel in enumerate(self.panels)),
            "tables": "\n".join(_table(table) for table in self.tables),
            "facts": facts,
            "data": plain([_chart(panel) for panel in self.panels]),
        }


def _frame(i: int, panel: Panel) -> str:
    title = html.escape(panel.title)
    kinds = ("linear", "log", "symlog") if panel.log else ()
    buttons = "".join(f'<button type="button" data-chart="{i}" data-scale="{k}">{k}</button>' for k in kinds)
    toggle = (
        f'<div class="scales" role="group" aria-label="scale of the vertical axis">{buttons}</div>' if kinds else ""
    )
    chart = f'<div id="chart{i}" role="img" aria-label="{title}"></div>'
    return f'<section class="chart"><h2>{title}</h2>{toggle}{chart}</section>'


def _chart(panel: Panel) -> dict:
    return {
        "x": panel.x_label,
        "y": panel.y_label,
        "marks": [float(m) for m in panel.marks if np.isfinite(m)],
        "spans": [[float(a), float(b)] for a, b in panel.spans if np.isfinite([a, b]).all()],
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
        "kind": line.kind,
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
