"""The embedded dataset `python-stdlib`: the source of the running Python's standard library.

It needs no network, every Python has it, and its licence (PSF) lets anyone use it. The same
Python gives the same bytes each time; other versions give other ones.
"""

import os
import platform
import sysconfig
from pathlib import Path

from rungs.common.errors import UserError
from rungs.data import text_dataset
from rungs.data.dataset import Source
from rungs.data.text_dataset import Sections, TextSection

NAME = "python-stdlib"
VOCAB_SIZE = 4096
VALIDATION_PERCENT = 5
_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "_bundled",
        "dist-packages",
        "encodings",  # mostly generated tables of characters
        "ensurepip",
        "idle_test",
        "site-packages",
        "test",
        "tests",
    }
)


def fill(folder: Path) -> Source:
    """Write token files and tokenizer into the dataset's folder.

    Raises:
        UserError: where this Python comes without its source.
    """
    sections = _sections(Path(sysconfig.get_path("stdlib")))
    tokenizer = text_dataset.tokenizer_for(sections["train"], VOCAB_SIZE)
    text_dataset.write(folder, sections, tokenizer)
    return Source(kind="python-stdlib", python_version=platform.python_version())


def _sections(library: Path) -> Sections:
    """The library's files, each in training or validation by a hash of its path."""
    sections: Sections = {"train": [], "validation": []}
    for path in _source_files(library):
        place = text_dataset.stable_hash(path.relative_to(library).as_posix()) % 100
        sections["validation" if place < VALIDATION_PERCENT else "train"].append(
            TextSection.whole(path)
        )
    if not all(sections.values()):
        raise UserError(
            f"{library}: this Python comes without the source of its standard library; use another"
            " Python, or your own text (download_dataset.py --text)"
        )
    return sections


def _source_files(library: Path) -> list[Path]:
    """Sorted, without tests, other people's packages and what differs between machines."""
    found = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [
            name for name in subfolders if name not in _LEFT_OUT and not name.startswith("config-")
        ]
        found += [
            Path(folder, name)
            for name in files
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize"))
        ]
    found.sort(key=lambda path: path.relative_to(library).as_posix())
    return [path for path in found if _is_utf8(path)]


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
