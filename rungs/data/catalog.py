"""The `datasets` folder: a dataset by its name, wherever it comes from."""

import difflib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from rungs.common import atomic_folder
from rungs.common.errors import UserError
from rungs.common.paths import checkout, is_folder, is_plain_name, is_there
from rungs.common.strict_json import format_value
from rungs.data import dataset, hub_dataset, pair_dataset, python_stdlib, text_dataset
from rungs.data.bpe import SMALLEST_VOCAB
from rungs.data.dataset import Dataset, Source
from rungs.data.text_dataset import TextSection
from rungs.data.tokenizer import Tokenizer

logger = logging.getLogger("rungs.dataset")

VARIABLE = "RUNGS_DATASETS_DIR"
"""Environment variable that names another place for the folder."""
_COMMAND = "uv run download_dataset.py"


def find_datasets_dir(option: Path | None = None) -> Path:
    """Where datasets are: as a command's option says, else the environment variable, else the
    folder `datasets` of the checkout or, without one, of the working directory."""
    if option:
        return option
    named = os.environ.get(VARIABLE)
    return Path(named) if named else (checkout() or Path()) / "datasets"


def folder_of(name: str, datasets_dir: Path) -> Path:
    """Folder of a dataset, whether it is there or not.

    Raises:
        UserError: for a name that cannot be one, such as one that leads out of the folder.
    """
    parts = name.split("/")
    if len(parts) > 2 or not all(map(_is_name, parts)):
        raise UserError(
            f"dataset {format_value(name)}: not a name; it must be {python_stdlib.NAME}, a folder"
            f" under {datasets_dir}, or a hub id owner/name"
        )
    return datasets_dir.joinpath(*parts)


def _is_name(part: str) -> bool:
    is_dotted = part.startswith(".") or part.endswith(".") or ".." in part
    return is_plain_name(part) and part == part.strip() and not is_dotted


def open_dataset(name: str, datasets_dir: Path, *, update: bool = True) -> Dataset:
    """Open a dataset, built or downloaded first where it is absent.

    Args:
        name: `python-stdlib`, a folder under `datasets_dir`, or a hub id `owner/name`.
        update: whether a dataset from the hub is brought up to date; else the network is never
            used where there is a copy.

    Raises:
        UserError: where there is no such dataset, or it is damaged.
    """
    folder = folder_of(name, datasets_dir)
    atomic_folder.recover_folder(folder)
    if "/" in name:
        hub_dataset.bring_up_to_date(name, folder, update=update)
    elif not is_there(folder):
        _build_named(name, folder)
    return Dataset(name, folder)


def add_text(
    name: str,
    files: list[Path],
    datasets_dir: Path,
    *,
    tokenizer: Tokenizer | int,
    validation_percent: float,
) -> Dataset:
    """Make a dataset of text files.

    Args:
        tokenizer: what to tokenize with, or the size of the vocabulary to train on the text.
        validation_percent: how much of the text is for validation, at least 0 and below 100.

    Raises:
        UserError: where the name is taken, or a file is missing or not UTF-8.
    """
    if isinstance(tokenizer, int) and tokenizer < SMALLEST_VOCAB:
        raise UserError(f"a vocabulary of {tokenizer} is too small; at least {SMALLEST_VOCAB}")
    whole = [TextSection.whole(path) for path in dict.fromkeys(files)]

    def fill(partial: Path) -> Source:
        sections = text_dataset.split_sections(whole, validation_percent)
        text_dataset.write(
            partial,
            sections,
            text_dataset.tokenizer_for(sections["train"], tokenizer)
            if isinstance(tokenizer, int)
            else tokenizer,
        )
        return Source(kind="text", files=[section.path.name for section in whole])

    return _add(name, datasets_dir, fill)


def add_pairs(
    name: str,
    files: list[Path],
    datasets_dir: Path,
    *,
    tokenizer: Tokenizer,
    validation_percent: float,
) -> Dataset:
    """Make a dataset of files with a prompt and its answer in each line.

    Args:
        tokenizer: that of the model which is to learn the answers.
        validation_percent: how much of the files is for validation, at least 0 and below 100.

    Raises:
        UserError: where the name is taken, or a file is missing, without a pair, or has a line
            that is none.
    """
    whole = [TextSection.whole(path) for path in dict.fromkeys(files)]

    def fill(partial: Path) -> Source:
        sections = pair_dataset.split_sections(whole, validation_percent)
        pair_dataset.write(partial, sections, tokenizer)
        return Source(kind="pairs", files=[section.path.name for section in whole])

    return _add(name, datasets_dir, fill)


def _add(name: str, datasets_dir: Path, fill: Callable[[Path], Source]) -> Dataset:
    """Make a dataset of the user's own files with what `fill` writes."""
    folder = folder_of(name, datasets_dir)
    if "/" in name or name == python_stdlib.NAME:
        raise UserError(f"dataset {name!r}: this name is for another source; choose one without /")
    if is_there(folder) or not _build(folder, fill):
        raise UserError(f"{folder}: exists already; choose another name, or delete it first")
    return Dataset(name, folder)


def _build_named(name: str, folder: Path) -> None:
    if name == python_stdlib.NAME:
        logger.info("making dataset %s in %s", name, folder)
        _build(folder, python_stdlib.fill)
        return
    known = [python_stdlib.NAME]
    if is_folder(folder.parent):
        known += [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
    close = difflib.get_close_matches(name, known, n=1)
    raise UserError(
        f"{folder}: no such dataset"
        + (f"; did you mean {close[0]}? Or make it:" if close else "; make it with")
        + f" {_COMMAND} --text FILE --name {name}"
    )


def _build(folder: Path, fill: Callable[[Path], Source]) -> bool:
    """Build a dataset's folder with what `fill` writes, unless another process just has."""
    with atomic_folder.lock_folder(folder):
        if folder.exists():
            return False
        with atomic_folder.replace_folder(folder) as partial:
            source = fill(partial)
            dataset.write_description(partial, dataset.describe(partial, source))
    return True
