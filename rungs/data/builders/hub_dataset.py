"""Download datasets from the Hugging Face hub, and update the local copy."""

from pathlib import Path

from rungs.common import disk, errors, hub
from rungs.common.run_log import log
from rungs.data import dataset, tokenizer

FILES = [*map(dataset.split_file, dataset.SPLITS), tokenizer.TOKENIZER_FILE]
"""The only files downloaded from a repository; none can contain code."""


def download(name: str, folder: Path, *, update: bool) -> None:
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
    except (errors.UserError, errors.RunFailure) as error:
        if not folder.exists():
            raise
        log.warning("%s: using the copy in %s, which may be outdated: %s", name, folder, error)


def _download_revision(name: str, folder: Path, state: hub.HubRepository) -> None:
    known = dataset.read_description(folder)
    if known and known.source.revision == state.revision:
        return  # another process downloaded it
    wanted = [file for file in FILES if file in state.files]
    if FILES[0] not in wanted:
        owner, repository = name.split("/")
        raise errors.UserError(
            f"{name}: not a dataset of Rungs: it has no {FILES[0]} on the hub; if it has text,"
            f" build one: uv run download_dataset.py {owner}/{repository} --tokenizer TOKENIZER"
        )
    with disk.atomic_folder(folder, replace=True, resume=True) as partial:
        _copy_old_files(partial, folder)
        hub.download_dataset(name, state.revision, wanted, partial)
        for file in set(FILES) - set(wanted):
            (partial / file).unlink(missing_ok=True)
        source = dataset.Source(kind="hub", revision=state.revision)
        description = dataset.describe(partial, source, _unchanged_splits(known, folder, partial))
        for split, found in description.splits.items():
            file = dataset.split_file(split)
            # the hub's library silently keeps older files if the connection ends between requests
            if state.files[file].sha256 not in (None, found.sha256):
                (partial / file).unlink()
                raise errors.UserError(f"{name}: {file} was not downloaded correctly; try again")
        dataset.write_description(partial, description)


def _copy_old_files(partial: Path, folder: Path) -> None:
    """Start from the existing copy, so that only changed files are downloaded."""
    if folder.exists() and not any(partial.iterdir()):
        for path in folder.iterdir():
            # Token files are replaced, never modified, so they can be hard links. The hub's
            # bookkeeping files are modified: a link would change the old copy's.
            disk.copy(path, partial / path.name, link=path.suffix == ".safetensors")
    (partial / tokenizer.TOKENIZER_FILE).unlink(missing_ok=True)


def _unchanged_splits(
    known: dataset.DatasetDescription | None, folder: Path, partial: Path
) -> dataset.DatasetDescription | None:
    """Return the old copy's description, with only the splits whose files did not change."""
    if known is None:
        return None
    unchanged = {
        split: description
        for split, description in known.splits.items()
        if (new := partial / dataset.split_file(split)).exists()
        and new.samefile(folder / dataset.split_file(split))
    }
    return known.model_copy(update={"splits": unchanged})
