"""One self-contained HTML page with text, tables, figures and interactive charts, in light and dark colours."""

import base64
import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.files import save_text
from stairwise.report.colors import BADGES, ICONS, INK, mode_color, run_color
from stairwise.staircase.advice import Advice
from stairwise.table import Table

Floats = NDArray[np.float64]
MOST_POINTS = 600  # per curve; a screen cannot show more
SCALES = ("log", "linear", "symlog")
DEEPEST = 1e-12  # a logarithmic axis shows nothing below this share of the largest value
LONG = 40  # characters; columns with longer cells hold sentences


@dataclass(frozen=True, eq=False)
class Line:
    """A curve in the colour of mode j of d if `mode` is (j, d), of run number `run`, or otherwise of the text.

    `kind` is "line", "stairs" (constant until the next point), "points" or "bars"; `steps` are the step numbers at `x`,
    if x is a time. `band` shades the area between the line and the one before it.
    """

    name: str
    x: NDArray
    y: NDArray
    mode: tuple[int, int] | None = None
    dashed: bool = False
    legend: bool = True
    kind: str = "line"
    steps: NDArray | None = None
    run: int | None = None
    band: bool = False


@dataclass(frozen=True)
class Stretch:
    """What a run was doing from one time to another, for the strip above a chart."""

    start: float
    end: float
    state: str
    words: str = ""


@dataclass(frozen=True, eq=False)
class Panel:
    """An interactive chart.

    Attributes:
        marks: vertical lines.
        log: start on a logarithmic axis, with buttons for others; values that are not positive start on `below_zero`.
        spans: shaded intervals of the horizontal axis.
        steps: converts a time on the horizontal axis into a step number.
        strip: coloured stretches above the chart.
        about: a run and its advice, shown above the chart.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[float] = ()
    log: bool = False
    spans: Sequence[tuple[float, float]] = ()
    steps: Callable[[Floats], Floats] | None = None
    strip: Sequence[Stretch] = ()
    about: tuple[str, Advice] | None = None
    below_zero: str = "symlog"


@dataclass(frozen=True)
class Picture:
    """A PNG with its alternative text."""

    path: Path
    alt: str


@dataclass(frozen=True)
class Page:
    """The contents of a page, from top to bottom; `advice` takes the place of the lead, `summary` stands above the
    charts, and `axis` is the horizontal axis to start with: "t" or "step"."""

    title: str
    lead: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    facts: dict[str, str] = field(default_factory=dict)
    advice: Advice | None = None
    summary: Sequence[Table] = ()
    axis: str = "t"

    def write(self, target: Path) -> None:
        """Write the page to one self-contained file."""
        script = f"<script>{plotly_library()}</script>" if self.panels else ""
        save_text(target, self.render(script, live=False))

    def render(self, plotly: str, live: bool) -> str:
        """The HTML text; `plotly` is the element that loads the library; a live page reloads data.json."""
        parts = self.parts()
        template = Template(files("stairwise.report").joinpath("page.html").read_text(encoding="utf-8"))
        return template.substitute(
            {name: value for name, value in parts.items() if isinstance(value, str)},
            # "</" would end the script
            data=json.dumps(parts["data"], allow_nan=False).replace("</", "<\\/"),
            hint='<p class="hint">Drag to zoom, double-click to zoom out.</p>' if self.panels else "",
            axes=_buttons("horizontal axis", ("t", "step"), "data-axis"),
            axis=json.dumps(self.axis),
            pictures="\n".join(_picture(picture) for picture in self.pictures),
            plotly=plotly,
            live=json.dumps(live),
        )

    def parts(self) -> dict[str, Any]:
        """The parts that change during a run: HTML of texts and tables, and the charts' data. While `layout` stays the
        same, a live page keeps its charts, so that a zoom is not lost, and changes only their `heads`."""
        facts = "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in self.facts.items())
        icon = f"{ICONS[self.advice.state]} " if self.advice else ""
        return {
            "tab": html.escape(icon + self.title),
            "title": html.escape(self.title),
            "lead": _advice(self.advice) if self.advice else f'<p class="lead">{html.escape(self.lead)}</p>',
            "summary": "\n".join(_table(table) for table in self.summary),
            "charts": "\n".join(_frame(i, panel) for i, panel in enumerate(self.panels)),
            "heads": [_head(panel) for panel in self.panels],
            "layout": "".join("-" if not panel.lines else "b" if panel.log else "c" for panel in self.panels),
            "tables": "\n".join(_table(table) for table in self.tables),
            "facts": facts,
            "data": [_chart(panel) for panel in self.panels],
        }


@cache
def plotly_library() -> str:
    """The JavaScript of plotly, read from its file: importing the Python package would take longer."""
    spec = find_spec("plotly")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        source = Path(folder) / "package_data" / "plotly.min.js"
        if source.is_file():
            return source.read_text(encoding="utf-8")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _badge(state: str) -> str:
    shades = BADGES[state]
    style = f"--light: {shades['light']}; --dark: {shades['dark']}"
    icon = f'<span aria-hidden="true">{ICONS[state]}</span>'
    return f'<span class="badge" style="{style}">{icon} {html.escape(state)}</span>'


def _advice(advice: Advice) -> str:
    evidence = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in advice.evidence)
    remedy = f'<p class="remedy"><b>What to do:</b> {html.escape(advice.remedy)}</p>' if advice.remedy else ""
    return f'<p class="state">{_badge(advice.state)}</p><ul class="evidence">{evidence}</ul>{remedy}'


def _buttons(label: str, kinds: Sequence[str], attributes: str) -> str:
    buttons = "".join(f'<button type="button" {attributes}="{kind}">{kind}</button>' for kind in kinds)
    return f'<div class="buttons" role="group" aria-label="{label}">{buttons}</div>'


def _frame(i: int, panel: Panel) -> str:
    head = f'<div class="head" id="head{i}">{_head(panel)}</div>'
    if not panel.lines:
        return f'<section class="chart">{head}</section>'
    scales = _buttons("scale of the vertical axis", SCALES, f'data-chart="{i}" data-scale') if panel.log else ""
    chart = f'<div class="plot" id="chart{i}" role="img" aria-labelledby="head{i}"></div>'
    return f'<section class="chart">{head}{scales}{chart}</section>'


def _head(panel: Panel) -> str:
    title = f"<h2>{html.escape(panel.title)}</h2>"
    if panel.about is None:
        return title
    name, advice = panel.about
    return f'<h2 class="run">{html.escape(name)}</h2>{_advice(advice)}{title.replace("h2>", "h3>")}'


def _chart(panel: Panel) -> dict:
    values = np.concatenate(
        [np.zeros(0), *(np.asarray(line.y, dtype=float) for line in panel.lines if not line.dashed)]
    )
    finite = values[np.isfinite(values)]
    return {
        "x": panel.x_label,
        "y": panel.y_label,
        "marks": [_at(panel, [m]) for m in panel.marks if np.isfinite(m)],
        "spans": [_at(panel, span) for span in panel.spans if np.isfinite(span).all()],
        "strip": [
            {"at": _at(panel, [s.start, s.end]), "state": f"{ICONS[s.state]} {s.state}", "words": s.words}
            | BADGES[s.state]
            for s in panel.strip
        ],
        "lines": [_line(line) for line in panel.lines],
        "scale": _scale(panel, finite),
        "unit": _unit(finite),
        "floor": _floor(finite),
    }


def _at(panel: Panel, times: Sequence[float]) -> dict:
    """Positions on the horizontal axis, as times and as steps; None: the panel knows no steps, or there are none."""
    steps = panel.steps(np.asarray(times, dtype=float)) if panel.steps else np.full(len(times), np.nan)
    return {"t": list(map(float, times)), "step": list(map(float, steps)) if np.isfinite(steps).all() else None}


def _scale(panel: Panel, values: Floats) -> str:
    if not panel.log or not len(values):
        return "linear"
    return "log" if (values > 0).all() else panel.below_zero


def _unit(values: Floats) -> float:
    """Values within ± this are drawn linearly on a symmetric logarithmic axis: the size of the negative values, which
    are noise, or the smallest positive value if there are none."""
    top = float(np.abs(values).max(initial=0.0))
    if top == 0:
        return 1.0
    below, above = -values[values < 0], values[values > 0]
    size = np.median(below) if len(below) else above.min()
    return float(np.clip(size, 1e-8 * top, 1e-2 * top))


def _floor(values: Floats) -> float | None:
    """Where a logarithmic axis begins, if not at the smallest positive value."""
    positive = values[values > 0]
    if not len(positive) or positive.min() >= DEEPEST * positive.max():
        return None
    return float(DEEPEST * positive.max())


def _line(line: Line) -> dict:
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).round().astype(int))
    colors = mode_color(*line.mode) if line.mode else INK if line.run is None else run_color(line.run)
    return {
        "name": line.name,
        "x": _numbers(x[keep]),
        "y": _numbers(y[keep]),
        "steps": None if line.steps is None else _numbers(np.asarray(line.steps, dtype=float)[keep], digits=9),
        "dash": "dash" if line.dashed else "solid",
        "legend": line.legend,
        "kind": line.kind,
        "band": line.band,
        **colors,
    }


def _numbers(values: Floats, digits: int = 6) -> list[float | None]:
    """Rounded numbers; NaN and infinities, which JSON does not know, become None: a gap."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]


def _table(table: Table) -> str:
    texts = [any(len(row[i]) > LONG for row in table.rows) for i in range(len(table.header))]
    head = _row("th", table.header, table.header, texts)
    rows = "".join(_row("td", table.header, row, texts) for row in table.rows)
    body = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
    note = f'<p class="hint">{html.escape(table.note)}</p>' if table.note else ""
    return f'<section><h2>{html.escape(table.title)}</h2><div class="scroll">{body}</div>{note}</section>'


def _row(tag: str, header: Sequence[str], cells: Sequence[str], texts: Sequence[bool]) -> str:
    inner = ""
    for column, cell, text in zip(header, cells, texts, strict=True):
        shown = _badge(cell) if column == "state" and cell in BADGES else html.escape(cell)
        inner += f'<{tag} class="words">{shown}</{tag}>' if text else f"<{tag}>{shown}</{tag}>"
    return f"<tr>{inner}</tr>"


def _picture(picture: Picture) -> str:
    code = base64.b64encode(picture.path.read_bytes()).decode()
    alt = html.escape(picture.alt, quote=True)
    return f'<figure><img src="data:image/png;base64,{code}" alt="{alt}"><figcaption>{alt}</figcaption></figure>'
