"""What a page of the documentation holds: code to run, commands, links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# a block of code, a hidden one, or commands that are only indented
BLOCK = re.compile(
    r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```"
    r"|^<!-- setup\n(?P<setup>.*?)^-->"
    r"|^ {4}(?P<line>(?:stairwise|torchrun) [^\n]*)$",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """`python` or `sh`, and its text; `line` where it begins."""

    kind: str
    text: str
    line: int


def pages() -> list[Path]:
    """All of docs/ and the README."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Everything that can be run, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for m in BLOCK.finditer(text):
        line = text[: m.start()].count("\n") + 1
        if m["setup"] is not None:
            found.append(Block("python", m["setup"], line))
        elif m["line"] is not None:
            found.append(Block("sh", m["line"], line))
        else:
            found.append(Block(m["kind"].strip(), m["code"], line))
    return found


def commands(block: Block) -> list[list[str]]:
    """Arguments of every `stairwise …` in a block; remarks come after a # or after two or more spaces."""
    text = block.text.replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        words = shlex.split(re.split(r" {2,}", line.strip().removeprefix("$ "))[0], comments=True)
        if words[:1] == ["stairwise"]:
            found.append(words[1:])
        elif "torchrun" in words[:1] and "stairwise" in words:
            found.append(words[words.index("stairwise") + 1 :])
    return found


def links(text: str) -> list[str]:
    """Targets of links and pictures, code left out."""
    text = re.sub(r"```.*?```|`[^`\n]+`|<!--.*?-->", "", text, flags=re.S)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(text: str) -> set[str]:
    """Of the headings, as the site makes them."""
    from markdown.extensions.toc import slugify

    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)}
