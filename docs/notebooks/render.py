"""A mkdocs hook: every notebook is shown as a page, with the outputs that are stored in it."""

from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add NAME.md for every NAME.ipynb; the notebook itself is copied next to it, for downloading."""
    for path in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        where = path.relative_to(config.docs_dir).with_suffix(".md").as_posix()
        files.append(File.generated(config, where, content=page(path)))
    return files


def page(path: Path) -> str:
    """A notebook as Markdown, with a link to the file after its title."""
    cells = [shown(cell) for cell in nbformat.read(path, as_version=4).cells]
    title, _, rest = cells[0].partition("\n")
    return "\n\n".join([title, f"[Download this notebook]({path.name})", rest.strip(), *cells[1:]])


def shown(cell: nbformat.NotebookNode) -> str:
    """A cell with its outputs: text, and pictures inside the page."""
    if cell.cell_type == "markdown":
        return str(cell.source)
    parts = [f"```python\n{cell.source}\n```"]
    for output in cell.outputs:
        if picture := output.get("data", {}).get("image/png"):
            parts.append(
                f'<img alt="figure drawn by the code above" src="data:image/png;base64,{"".join(picture.split())}">'
            )
        elif text := output.get("text") or output.get("data", {}).get("text/plain"):
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)
