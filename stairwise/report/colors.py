"""Colours of the pages, chosen to be readable on a light and on a dark page: curves by mode or by run, and states."""

from stairwise.staircase.advice import STATES

Shades = dict[str, str]  # "light" and "dark": the colour on a light and on a dark page

# matplotlib's cividis at 17 equal distances; importing matplotlib for a few colours would take longer than the page
CIVIDIS = (
    *("#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78", "#8c8878"),
    *("#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838"),
)
LIGHTEST, DARKEST = 0.6, 0.42  # on a light page cividis is used up to 0.6, on a dark page from 0.42: contrast above 3
INK: Shades = {"light": "#1b2a41", "dark": "#e8eaf0"}
RUNS: tuple[Shades, ...] = (
    {"light": "#0064a4", "dark": "#56b4e9"},
    {"light": "#c24e00", "dark": "#ff9a4d"},
    {"light": "#007a58", "dark": "#2fc99b"},
    {"light": "#a8447f", "dark": "#e79ac3"},
    {"light": "#6f6300", "dark": "#f0e442"},
    {"light": "#5546a8", "dark": "#a99cf5"},
    {"light": "#5b6678", "dark": "#b8c0cc"},
)
# a sign besides the colour, for readers who see no colours
ICONS = dict(zip(STATES, "○▲◐✓?▼✕∞", strict=True))
BADGES: dict[str, Shades] = {
    "not started": {"light": "#5b6678", "dark": "#a3acbb"},
    "learning": {"light": "#1d5fa8", "dark": "#7db7f2"},
    "waiting": {"light": "#6b4fa0", "dark": "#bda6ee"},
    "finished": {"light": "#1e7a3c", "dark": "#6fcf8c"},
    "cannot tell yet": {"light": "#6d6a5a", "dark": "#c9c3a6"},
    "collapsing": {"light": "#a85400", "dark": "#f5a55a"},
    "collapsed": {"light": "#b3261e", "dark": "#ff8a80"},
    "diverged": {"light": "#8e1f6b", "dark": "#f08cc8"},
}


def mode_color(j: int, d: int) -> Shades:
    """Colour of mode j of d, from blue to yellow.

    >>> mode_color(0, 8)["light"], mode_color(7, 8)["dark"]
    ('#00224e', '#fee838')
    """
    share = j / max(d - 1, 1)
    return {"light": _cividis(LIGHTEST * share), "dark": _cividis(DARKEST + (1 - DARKEST) * share)}


def run_color(i: int) -> Shades:
    """Colour of run i; after the last colour they begin again."""
    return RUNS[i % len(RUNS)]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours by the Web Content Accessibility Guidelines, between 1 and 21.

    >>> round(contrast("#000000", "#ffffff"), 6)
    21.0
    """
    low, high = sorted(0.05 + _luminance(color) for color in (one, other))
    return high / low


def _cividis(x: float) -> str:
    at = x * (len(CIVIDIS) - 1)
    left = min(int(at), len(CIVIDIS) - 2)
    mixed = (
        round(a + (at - left) * (b - a)) for a, b in zip(_rgb(CIVIDIS[left]), _rgb(CIVIDIS[left + 1]), strict=True)
    )
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _luminance(color: str) -> float:
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in _rgb(color))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
