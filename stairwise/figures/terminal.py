"""Draw a curve in a terminal."""

import numpy as np
from numpy.typing import NDArray

BLOCKS = " ▁▂▃▄▅▆▇█"


def text_curve(x: NDArray, y: NDArray, width: int = 64, height: int = 8) -> str:
    """A filled curve of nonnegative values in block characters, with axis labels.

    >>> print(text_curve(np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0]), width=5, height=2))
       2 █▄
         ███▄
       0 └─────
         0    2
    """
    top = float(y.max()) or 1.0
    at = np.interp(np.linspace(x[0], x[-1], width), x, y) / top * height
    rows = []
    for level in range(height - 1, -1, -1):
        cells = "".join(BLOCKS[int(np.clip(np.round(8 * (v - level)), 0, 8))] for v in at)
        rows.append((f"{top:4.4g}" if level == height - 1 else "    ") + " " + cells.rstrip())
    rows.append("   0 └" + "─" * width)
    end = f"{x[-1]:.4g}"
    rows.append("     " + f"{x[0]:.4g}".ljust(width + 1 - len(end)) + end)
    return "\n".join(rows)
