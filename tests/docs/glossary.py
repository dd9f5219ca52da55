"""The glossary's words on the other pages: which are not linked where they are first used, and a tool that links them.

python -m tests.docs.glossary            list what is missing
python -m tests.docs.glossary --write    link it
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"

# anchor: the word as it stands in running text
TERMS = {
    "view": r"(?<!in )\b[Vv]iews?\b",
    "c": r"(?<![\w.,‖’'-])(?<!Panel )(?<!− )C(?![\w‖’'-])(?!, D)",
    "mode": r"(?<!evaluation )(?<!training )(?<!padding )\b[Mm]odes?\b",
    "step": r"(?<!\d )\b[Ss]teps?\b",
    "plateau": r"\b[Pp]lateaus?\b",
    "grown": r"\b[Gg]rown\b",
    "rise-time": r"\b[Rr]ise times?\b",
    "event": r"\b[Ee]vents?\b",
    "time-t": r"\b[Tt]ime t\b|\bt = Σ",
    "record": r"\b[Rr]ecords?\b",
}

# not running text: code, comments, tables, headings, pictures, links, claims in italics, directives, HTML
ASIDE = re.compile(
    r"```.*?```|<!--.*?-->|^ {4}.*?$|^\|.*?$|^#.*?$|^:::.*?$|`[^`\n]+`"
    r"|!?\[[^\]]*\]\([^)]*\)|(?<!\*)\*[^*\n]+\*(?!\*)|<[^>\n]+>",
    re.S | re.M,
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)#([\w-]+)\)")


def pages() -> list[Path]:
    """Pages that people read, other than the glossary; pages of the reference are made from docstrings."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page != PAGE and "reference" not in page.parts]


def first_uses(text: str) -> dict[str, re.Match[str]]:
    """By anchor: the first use in running text that no link to the glossary precedes."""
    blank = ASIDE.sub(lambda aside: re.sub(r"[^\n]", " ", aside[0]), text)
    linked = {m[3]: m.start() for m in reversed(list(LINK.finditer(text))) if m[2].endswith("glossary.md")}
    uses = {anchor: re.search(word, blank) for anchor, word in TERMS.items()}
    return {a: use for a, use in uses.items() if use and linked.get(a, len(text)) > use.start()}


def linked(text: str, page: Path) -> str:
    """The page with its first uses linked."""
    target = os.path.relpath(PAGE, page.parent)
    for anchor, use in sorted(first_uses(text).items(), key=lambda found: -found[1].start()):
        text = f"{text[: use.start()]}[{use[0]}]({target}#{anchor}){text[use.end() :]}"
    return text


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        missing = first_uses(text)
        if missing:
            print(page.relative_to(ROOT), *missing)
            if "--write" in sys.argv:
                page.write_text(linked(text, page), encoding="utf-8")


if __name__ == "__main__":
    main()
