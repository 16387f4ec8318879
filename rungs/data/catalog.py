"""Open a dataset by its name. If it is missing, build or download it first."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rungs.common import disk, hub, paths, shown_text, strict_json
from rungs.common.errors import RunFailure, UserError, did_you_mean
from rungs.common.run_log import log
from rungs.config.option_values import DATASETS_VARIABLE
from rungs.data.build import task_dataset, text_dataset
from rungs.data.text import tokenizer
from rungs.data.tokens import dataset
from rungs.data.tokens.dataset import Dataset, Source

if TYPE_CHECKING:  # else every command would import PyArrow
    from rungs.data.build.document_dataset import Request


BUILT_IN: dict[str, Callable[[Path], Source]] = {
    text_dataset.PYTHON_STDLIB: text_dataset.build_stdlib,
    **{name: functools.partial(task_dataset.build, name) for name in task_dataset.TASK_DATASETS},
}
"""Datasets that are built on first use."""
HUB_FILES = [*map(dataset.split_file, dataset.SPLITS), tokenizer.TOKENIZER_FILE]
"""The only files downloaded from a repository; none can contain code."""


def find_datasets_dir(option: Path | str | None = None) -> Path:
    """Return the folder that holds the datasets: the command-line option, else the environment
    variable, else `datasets` in the checkout or, without one, the working directory."""
    if given := option or os.environ.get(DATASETS_VARIABLE):
        return Path(given)
    return (paths.checkout() or Path()) / "datasets"


def dataset_folder(name: str, datasets_dir: Path) -> Path:
    """Return the folder of a dataset, which may not exist. Raises UserError if the name is not
    valid, for example if it leads out of `datasets_dir`."""
    parts = name.split("/")
    is_dotted = any(part.startswith(".") or part.endswith(".") or ".." in part for part in parts)
    are_plain = all(paths.is_plain_name(part) and part == part.strip() for part in parts)
    if len(parts) > 2 or is_dotted or not are_plain:
        raise UserError(
            f"dataset {strict_json.format_value(name)}: not a name; it must be"
            f" {', '.join(BUILT_IN)}, a folder under {datasets_dir}, or a hub id owner/name"
        )
    return datasets_dir.joinpath(*parts)


def open_dataset(
    name: str, datasets_dir: Path | str | None = None, *, update: bool = True
) -> Dataset:
    """Open a dataset: one of `BUILT_IN`, a folder under `datasets_dir` (default: the commands'), or
    a hub id `owner/name`. Builds or downloads it first if it is missing. Without `update`, the hub
    is not asked for a newer version. Raises UserError if it does not exist or is damaged."""
    folder = dataset_folder(name, find_datasets_dir(datasets_dir))
    disk.recover_folder(folder)
    if "/" in name:
        _download(name, folder, update=update)
    elif not folder.exists():
        _build_by_name(name, folder)
    return Dataset(name, folder)


def open_datasets(
    names: Iterable[str], datasets_dir: Path, *, update: bool = True
) -> dict[str, Dataset]:
    """Open several datasets, as `open_dataset` does; return them by name."""
    return {name: open_dataset(name, datasets_dir, update=update) for name in names}


def build_dataset(
    name: str, files: Sequence[Any], datasets_dir: Path, build: Callable[[Path, list[Any]], Source]
) -> Dataset:
    """Build a dataset from the user's files with `build` of `text_dataset`, `pair_dataset`,
    `chat_dataset`, `preference_dataset` or `tokens_dataset`. Raises UserError if the name is taken,
    or a file is missing or not of its kind."""
    folder = dataset_folder(name, datasets_dir)
    if "/" in name or name in BUILT_IN:
        raise UserError(f"dataset {name!r}: this name is reserved; choose another one, without /")
    different = list(dict.fromkeys(files))
    if folder.exists() or not _build_folder(folder, lambda at: build(at, different)):
        raise UserError(f"{folder}: already exists; choose another name, or delete it first")
    return Dataset(name, folder)


def build_documents_dataset(name: str, request: "Request", datasets_dir: Path) -> Dataset:
    """Build a dataset from files of documents, or continue an unfinished one. Raises UserError if
    another dataset has the name, or a file cannot be read or downloaded."""
    from rungs.data.build import document_dataset

    folder = dataset_folder(name, datasets_dir)
    if name in BUILT_IN:
        raise UserError(f"dataset {name!r}: this name is reserved; choose another one")
    with disk.lock_folder(folder):
        if folder.exists():
            known = dataset.read_description(folder)
            found = known.source.documents if known else None
            if found is None or found.request != request.checksum:
                raise UserError(
                    f"{folder}: already exists, built in another way; choose another --name, or"
                    " delete it first"
                )
            return Dataset(name, folder)
        with disk.atomic_folder(folder, replace=True, resume=True) as partial:
            source = document_dataset.build(partial, request)
            dataset.write_description(partial, dataset.describe(partial, source))
            document_dataset.remove_leftovers(partial)
    return Dataset(name, folder)


def _build_by_name(name: str, folder: Path) -> None:
    if name in BUILT_IN:
        log.info("building dataset %s in %s", name, folder)
        _build_folder(folder, BUILT_IN[name])
        return
    known = [*BUILT_IN]
    if folder.parent.is_dir():
        known += [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
    meant = did_you_mean(name, known, "")
    advice = f"{meant} Or build it:" if meant else "build it with"
    raise UserError(
        f"{folder}: no such dataset; {advice} {build_command(name)}, and --tokenizer RUN if it is"
        " to fine-tune the model of RUN"
    )


def build_command(name: str) -> str:
    """Return the command that builds or downloads a missing dataset."""
    is_known = name in BUILT_IN or "/" in name
    source = "" if is_known else "--text FILE --name "
    return f"{shown_text.command_line('download_dataset')} {source}{shown_text.quoted(name)}"


def _build_folder(folder: Path, build: Callable[[Path], Source]) -> bool:
    """Build a dataset's folder. Return False if it exists, possibly built by another process."""
    with disk.lock_folder(folder):
        if folder.exists():
            return False
        with disk.atomic_folder(folder, replace=True) as partial:
            source = build(partial)
            dataset.write_description(partial, dataset.describe(partial, source))
    return True


def _download(name: str, folder: Path, *, update: bool) -> None:
    """Download the dataset `owner/name` into `folder`, unless it exists and, with `update`, is up
    to date. If the hub cannot be reached, an existing copy is used. A folder not from the hub is
    the user's and never changed. Raises UserError if there is no copy and the download fails."""
    known = dataset.read_description(folder)
    if folder.exists() and not (update and known and known.source.kind == "hub"):
        return
    try:
        state = hub.dataset_repository(name)
        if known is None or known.source.revision != state.revision:
            with disk.lock_folder(folder):
                _download_revision(name, folder, state)
    except (UserError, RunFailure) as error:
        if not folder.exists():
            raise
        log.warning("%s: using the copy in %s, which may be outdated: %s", name, folder, error)


def _download_revision(name: str, folder: Path, state: hub.HubRepository) -> None:
    known = dataset.read_description(folder)
    if known and known.source.revision == state.revision:
        return  # another process downloaded it
    wanted = [file for file in HUB_FILES if file in state.files]
    if HUB_FILES[0] not in wanted:
        owner, repository = name.split("/")
        raise UserError(
            f"{name}: not a dataset of Rungs: it has no {HUB_FILES[0]} on the hub; if it has text,"
            f" build one: {shown_text.command_line('download_dataset')} {owner}/{repository}"
            " --tokenizer TOKENIZER"
        )
    with disk.atomic_folder(folder, replace=True, resume=True) as partial:
        _copy_old_files(partial, folder)
        hub.download_dataset(name, state.revision, wanted, partial)
        for file in set(HUB_FILES) - set(wanted):
            (partial / file).unlink(missing_ok=True)
        source = dataset.Source(kind="hub", revision=state.revision)
        description = dataset.describe(partial, source)
        for split, found in description.splits.items():
            file = dataset.split_file(split)
            # the hub's library silently keeps older files if the connection ends between requests
            if state.files[file].sha256 not in (None, found.sha256):
                (partial / file).unlink()
                raise UserError(f"{name}: {file} was not downloaded correctly; try again")
        dataset.write_description(partial, description)


def _copy_old_files(partial: Path, folder: Path) -> None:
    """Start from the existing copy, so that only changed files are downloaded."""
    if folder.exists() and not any(partial.iterdir()):
        for path in folder.iterdir():
            # Token files are replaced, never modified, so they can be hard links. The hub's
            # bookkeeping files are modified: a link would change the old copy's.
            disk.copy(path, partial / path.name, link=path.suffix == ".safetensors")
    (partial / tokenizer.TOKENIZER_FILE).unlink(missing_ok=True)
