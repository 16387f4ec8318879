"""Build the dataset `python-stdlib` from the source of Python's standard library (PSF license),
which every Python has. The same Python version always gives the same bytes."""

import os
import platform
import sysconfig
from pathlib import Path

from rungs.common.errors import UserError
from rungs.config.option_values import VALIDATION_PERCENT, VOCAB_SIZE
from rungs.data import dataset
from rungs.data.builders import text_dataset
from rungs.data.builders.sections import TextSection, stable_hash

NAME = "python-stdlib"
_EXCLUDED = {
    *("__pycache__", "_bundled", "dist-packages", "ensurepip", "idle_test", "site-packages"),
    *("encodings", "test", "tests"),  # encodings: mostly generated tables of characters
}


def build(folder: Path) -> dataset.Source:
    """Write the dataset's token files and tokenizer into a folder. Raises UserError if this Python
    has no source code of its standard library."""
    sections = _split_library(Path(sysconfig.get_path("stdlib")))
    tokenizer = text_dataset.train_tokenizer(sections["train"], VOCAB_SIZE)
    text_dataset.write(folder, sections, tokenizer)
    return dataset.Source(kind="python-stdlib", python_version=platform.python_version())


def _split_library(library: Path) -> text_dataset.Sections:
    """Assign each file to training or validation by a hash of its path."""
    sections: text_dataset.Sections = {"train": [], "validation": []}
    for path in _source_files(library):
        number = stable_hash(path.relative_to(library).as_posix()) % 100
        sections["validation" if number < VALIDATION_PERCENT else "train"].append(
            TextSection.of_file(path)
        )
    if not all(sections.values()):
        raise UserError(
            f"{library}: this Python has no source code of its standard library; use another"
            " Python, or your own text: uv run download_dataset.py --text FILE --name NAME"
        )
    return sections


def _source_files(library: Path) -> list[Path]:
    """Return the library's source files in order, except tests, third-party packages and files that
    differ between machines."""
    found = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [
            name for name in subfolders if name not in _EXCLUDED and not name.startswith("config-")
        ]
        found += [
            Path(folder, name)
            for name in files
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize"))
        ]
    return sorted(filter(_is_utf8, found), key=lambda path: path.relative_to(library).as_posix())


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
