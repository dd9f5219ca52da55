"""The documentation: every block of code runs, every link leads somewhere, the site builds without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
import typer
from typer.testing import CliRunner

import stairwise as sw
from stairwise.cli import app
from stairwise.staircase.advice import STATES
from stairwise.staircase.notes import NOTES
from stairwise.staircase.words import REMEDIES, SENTENCES

from . import glossary
from .pages import DOCS, ROOT, Block, anchors, blocks, commands, links, name, pages

NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
LANGUAGES = {"python", "sh", "text", "json", "toml"}

# commands that are parsed but not run, and why
COSTLY = {
    r"^(demo|reproduce|ntk)\b|^train (?!--list)": "trains or takes minutes; they have tests of their own",
    r"^watch\b": "serves until it is stopped",
    r"^spectrum\b.*mynet": "mynet stands for the reader's own module",
}


def runnable():
    return [page for page in pages() if any(block.kind in ("python", "sh") for block in blocks(page))]


@pytest.mark.parametrize("page", runnable(), ids=name)
def test_code_on_the_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in order: Python in one namespace, commands in the same folder."""
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names = {"__name__": "page"}
    ran = set()
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        if block.kind == "python":
            exec(compile("\n" * block.line + block.text, where, "exec"), names)
        elif block.kind == "sh":
            for words in commands(block):
                parse(words, where)
                if cheap(words) and tuple(words) not in ran:
                    ran.add(tuple(words))
                    done = CliRunner().invoke(app, words, catch_exceptions=False)
                    assert done.exit_code == 0, (where, words, done.output)


def test_commands_that_are_not_run_are_still_there():
    every = [
        " ".join(words) for page in pages() for block in blocks(page) if block.kind == "sh" for words in commands(block)
    ]
    assert [pattern for pattern in COSTLY if not any(re.search(pattern, line) for line in every)] == []


def cheap(words):
    line = " ".join(words)
    return not any(re.search(pattern, line) for pattern in COSTLY)


def parse(words, where):
    """The command exists and takes these options."""
    command, rest = typer.main.get_command(app), list(words)
    while hasattr(command, "commands"):
        assert rest, f"{where}: no command"
        assert rest[0] in command.commands, f"{where}: no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    if len(words) > 1:  # else it is only named
        command.make_context(words[0], rest)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_in_the_text_can_be_given(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for code in re.findall(r"`((?:stairwise|torchrun) [^`]+)`", text):
        for words in commands(Block("sh", " ".join(code.split()), 0)):
            if "…" not in words:
                parse(words, f"{name(page)}: {code}")


@pytest.mark.parametrize("page", pages(), ids=name)
def test_blocks_have_a_known_language(page):
    """So none escapes by another name; a block that is not run says that it is text."""
    assert {block.kind for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in links(text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        notebook = target.with_suffix(".ipynb")  # its page is made from it
        assert target.exists() or notebook in NOTEBOOKS, link
        if anchor and target.suffix == ".md" and target.exists():
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", glossary.pages(), ids=name)
def test_first_use_of_a_word_links_to_the_glossary(page):
    missing = glossary.first_uses(page.read_text(encoding="utf-8"))
    assert not missing, f"{sorted(missing)}: `python -m tests.docs.glossary --write` links them"


def test_the_glossary_explains_every_word():
    assert anchors(glossary.PAGE.read_text(encoding="utf-8")) >= set(glossary.TERMS)


def test_every_public_name_is_in_the_reference():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: stairwise\.(\w+)$", text, re.M))
    assert documented >= set(sw.__all__)
    index = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    assert not [public for public in sw.__all__ if f"`{public}`" not in index]


def test_sentences_on_the_page_of_the_monitor_are_those_of_the_advice():
    """All of them, with … for what changes: sentences, remedies, and what is said beside them."""
    page = (DOCS / "staircase.md").read_text(encoding="utf-8")
    for table, known in (("| sentence |", SENTENCES), ("| what to do |", REMEDIES), ("| beside it |", NOTES)):
        rows = page[page.index(f"\n{table}") :].partition("\n\n")[0]
        listed = re.findall(r'^\| "([^"]+)" \|', rows, re.M)
        assert listed == [re.sub(r"\{[^}]*\}", "…", sentence) for sentence in known.values()]


def test_states_in_the_glossary_are_those_of_the_advice():
    section = glossary.PAGE.read_text(encoding="utf-8").partition("## State")[2].partition("\n## ")[0]
    listed = [state for line in re.findall(r"^- (.*?):", section, re.M) for state in re.findall(r"\*([^*]+)\*", line)]
    assert listed == list(STATES)


def test_the_site_builds_without_a_warning(tmp_path):
    """Strictly, without importing torch, and so that pages load nothing from other machines."""
    code = "import sys; sys.modules['torch'] = None; from mkdocs.__main__ import cli; cli()"
    command = [sys.executable, "-c", code, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    html = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    assert len(html) >= len(pages())
    for text in html:
        assert not re.search(r"<(script|img|iframe)[^>]+src=[\"']?https?:|<link[^>]+stylesheet[^>]+https?:", text)
        assert not re.search(r"^:::", text, re.M), "a directive was not resolved"
        assert "<blockquote>" not in text, "a doctest was not shown as code"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_run(path, tmp_path):
    """From the first cell to the last in a fresh kernel; outputs are stored, and small."""
    code = (
        "import sys, nbformat; from nbclient import NotebookClient;"
        "book = nbformat.read(sys.argv[1], as_version=4); nbformat.validate(book);"
        "NotebookClient(book, timeout=60, kernel_name='python3').execute()"
    )
    env = os.environ | {
        "PYTHONPATH": str(Path(sw.__file__).parents[1]),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **{name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")},
    }
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size < 200_000
    assert '"output_type"' in path.read_text(encoding="utf-8")
