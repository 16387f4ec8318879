"""Execute notebooks and write each with its outputs next to its script:
`uv run notebooks/execute.py [NAME…]`, all without a NAME. A name may be the beginning of one."""

import base64
import hashlib
import io
import os
import re
import resource
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from notebooks.opening import with_opening

NOTEBOOKS = Path(__file__).resolve().parent
ROOT = NOTEBOOKS.parent
TOOLS = NOTEBOOKS / "tools.py"
SECONDS_PER_CELL = 300
"""On a busy machine; a notebook takes a few minutes on a quiet one."""
_WORK_FOLDER = re.compile(re.escape(tempfile.gettempdir()) + r"/rungs-([a-z0-9-]+)-\w{8}\b")
"""A folder of `tools.work_folder`."""
_COLORS = 128
"""Of a picture. Charts look the same with so many, and take a third of the bytes."""


def main(names: list[str]) -> None:
    """Execute the notebooks of these names."""
    for script in scripts(names):
        before = _processor_seconds()
        notebook = executed(script)
        notebook.metadata.rungs.seconds = round(_processor_seconds() - before)
        nbformat.write(with_opening(notebook, script.stem), script.with_suffix(".ipynb"))
        print(
            f"{script.stem}: {notebook.metadata.rungs.seconds} seconds of processor time",
            flush=True,
        )


def scripts(names: list[str]) -> list[Path]:
    """Return the scripts whose names begin with one of these; all if there are none."""
    found = sorted(NOTEBOOKS.glob("[0-9]*.py"))
    for name in names:
        if not any(script.stem.startswith(name) for script in found):
            sys.exit(f"error: no notebook's name begins with {name}")
    return [script for script in found if script.stem.startswith(tuple(names or [""]))]


def executed(script: Path) -> NotebookNode:
    """Return a notebook with its outputs, and without what is of this machine or of this day.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the kernel and of the commands that it runs
    notebook = jupytext.read(script)
    NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        rungs=NotebookNode(source=checksum(script)),
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = str(number), NotebookNode()
        for output in cell.get("outputs", []):
            _clean(output)
    return notebook


def checksum(script: Path) -> str:
    """Return a checksum of a script, and of `tools.py` if it uses that."""
    source = script.read_bytes()
    if b"from tools import" in source:
        source += TOOLS.read_bytes()
    return hashlib.sha256(source).hexdigest()


def _processor_seconds() -> float:
    """Return what ended kernels and the commands that they ran have taken, on all cores."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _clean(output: NotebookNode) -> None:
    """Take this machine's paths out of an output, and colours that nobody sees out of pictures."""
    if "text" in output:
        output.text = _without_paths(output.text)
    data = output.get("data", {})
    if "image/png" in data:
        data["image/png"] = _with_few_colors(data["image/png"])
        data.pop("text/plain", None)
    if "text/plain" in data:
        data["text/plain"] = _without_paths(data["text/plain"])


def _without_paths(text: str) -> str:
    return _WORK_FOLDER.sub(r"/tmp/rungs-\1", text).replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def _with_few_colors(png: str) -> str:
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        small = io.BytesIO()
        picture.convert("RGB").quantize(_COLORS).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


if __name__ == "__main__":
    main(sys.argv[1:])
