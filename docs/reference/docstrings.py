"""A griffe extension: doctests in our docstrings are shown as code, wherever they stand."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """`Example:` sections and bare doctests become griffe's `Examples:` sections; other examples become code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = sections(obj.docstring.value)


def sections(text: str) -> str:
    """A docstring in which every example is in a section that griffe knows."""
    parts = re.split(r"\n\n+", text)
    for i, part in enumerate(parts):
        if part.startswith(">>>"):
            parts[i] = "Examples:\n" + re.sub(r"(?m)^(?=.)", "    ", part)
        elif found := re.match(r"Example:\n(?P<body>.*)", part, re.S):
            body = found["body"]
            if ">>>" not in body:
                body = "    ```python\n" + body + "\n    ```"
            parts[i] = f"Examples:\n{body}"
    return "\n\n".join(parts)
