"""An executed notebook as a page: its text, its code, and what the code printed and drew."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode


def markdown_of(notebook: Path) -> str:
    """Return an executed notebook as Markdown, with its pictures in it."""
    parts = [part for cell in nbformat.read(notebook, as_version=4).cells for part in _parts(cell)]
    return "\n\n".join([*parts, f"*{_origin(notebook)}*"]) + "\n"


def _origin(notebook: Path) -> str:
    script = f"notebooks/{notebook.stem}.py"
    return (
        f"This page is `{script}`, executed on two CPU cores. To run and change it:"
        " `uv run --group notebooks jupyter lab notebooks/`, or take the"
        f' <a href="{notebook.name}" download>notebook</a> elsewhere.'
    )


def _parts(cell: NotebookNode) -> list[str]:
    if cell.cell_type == "markdown":
        return [cell.source]
    if cell.execution_count is None:  # it gets Rungs where a reader runs the notebook
        return []
    return [_block(cell.source, ".python"), *filter(None, map(_shown, cell.outputs))]


def _shown(output: NotebookNode) -> str:
    """Return what a cell printed, or the picture that it drew; empty if it printed empty lines."""
    if output.output_type == "stream":
        text = output.text.strip("\n")
        return _block(text, ".text .output") if text else ""
    if "image/png" in output.data:
        address = f"data:image/png;base64,{output.data['image/png'].strip()}"
        return f'<img class="output" alt="Picture drawn by the code above" src="{address}">'
    return _block(output.data["text/plain"], ".text .output")


def _block(text: str, classes: str) -> str:
    """Return a fenced block."""
    assert "```" not in text, text
    return f"``` {{ {classes} }}\n{text}\n```"
