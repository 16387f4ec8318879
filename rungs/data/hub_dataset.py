"""Datasets of the Hugging Face hub: a local copy, brought up to date when asked."""

import logging
import shutil
from pathlib import Path

from rungs.common import atomic_folder, hub
from rungs.common.disk import link_or_copy
from rungs.common.errors import UserError
from rungs.common.paths import is_there
from rungs.data import dataset
from rungs.data.dataset import DatasetDescription, Source
from rungs.data.tokenizer import TOKENIZER_FILE

logger = logging.getLogger("rungs.hub_dataset")
FILES = [*map(dataset.split_file, dataset.SPLITS), TOKENIZER_FILE]
"""All that is taken from a repository: nothing in it can hold code."""


def bring_up_to_date(name: str, folder: Path, *, update: bool) -> None:
    """Download `owner/name` into `folder` where it is absent, or outdated and `update`.

    A copy that is there is used where the hub cannot be reached. A folder that did not come from
    the hub is the user's and stays as it is.

    Raises:
        UserError: where there is no copy and none can be had.
    """
    known = dataset.read_description(folder)
    if is_there(folder) and not (update and known and known.source.kind == "hub"):
        return
    try:
        state = hub.dataset_state(name)
        if known is None or known.source.revision != state.revision:
            with atomic_folder.lock_folder(folder):
                _download(name, folder, state)
    except UserError as error:
        if not is_there(folder):
            raise
        logger.warning("%s: using the copy in %s, which may be outdated: %s", name, folder, error)


def _download(name: str, folder: Path, state: hub.HubDataset) -> None:
    known = dataset.read_description(folder)
    if known and known.source.revision == state.revision:
        return  # another process was faster
    wanted = [file for file in FILES if file in state.files]
    if FILES[0] not in wanted:
        raise UserError(f"{name}: not a dataset for us: there is no {FILES[0]} in it on the hub")
    with atomic_folder.replace_folder(folder, resume=True) as partial:
        _seed(partial, folder)
        hub.download_dataset(name, state.revision, wanted, partial)
        for file in set(FILES) - set(wanted):
            (partial / file).unlink(missing_ok=True)
        source = Source(kind="hub", revision=state.revision)
        description = dataset.describe(partial, source, _unchanged(known, folder, partial))
        _verify(name, partial, description, state)
        dataset.write_description(partial, description)


def _seed(partial: Path, folder: Path) -> None:
    """Start from the copy there is, so that only files that changed are downloaded."""
    if folder.exists() and not any(partial.iterdir()):
        shutil.copytree(folder, partial, copy_function=_reuse, dirs_exist_ok=True)
    (partial / TOKENIZER_FILE).unlink(missing_ok=True)


def _reuse(source: str, target: str) -> None:
    # Token files are replaced, never written to, so they can be linked. The hub's own bookkeeping
    # files are written to: a link would change those of the old copy.
    copy = link_or_copy if source.endswith(".safetensors") else shutil.copy2
    copy(source, target)


def _unchanged(
    known: DatasetDescription | None, folder: Path, partial: Path
) -> DatasetDescription | None:
    """Of what is known of the old copy, the splits whose files are the same in the new one."""
    if known is None:
        return None
    same = {
        split: description
        for split, description in known.splits.items()
        if (new := partial / dataset.split_file(split)).exists()
        and new.samefile(folder / dataset.split_file(split))
    }
    return known.model_copy(update={"splits": same})


def _verify(
    name: str, partial: Path, description: DatasetDescription, state: hub.HubDataset
) -> None:
    """Check that the token files are those of the hub: its library falls back on older ones
    where the connection ends between two of its questions."""
    for split, found in description.splits.items():
        file = dataset.split_file(split)
        if state.files[file] not in (None, found.sha256):
            (partial / file).unlink()
            raise UserError(f"{name}: {file} did not arrive as it is on the hub; try again")
