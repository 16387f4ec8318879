"""The Hugging Face hub: every use of the network is in here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from errors import UserError

_TIMEOUT_SECONDS = 10


class HubDataset(NamedTuple):
    """A dataset repository as the hub has it now."""

    revision: str
    """The commit."""
    files: dict[str, str | None]
    """Names, each with the file's SHA-256 where the hub tells it, as it does for token files."""


def dataset_state(name: str) -> HubDataset:
    """Ask the hub for a dataset's present state.

    Raises:
        UserError: where there is none or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _explained(f"dataset {name}"):
        info = HfApi().dataset_info(name, timeout=_TIMEOUT_SECONDS, files_metadata=True)
        files = {
            sibling.rfilename: sibling.lfs.sha256 if sibling.lfs else None
            for sibling in info.siblings or []
        }
        return HubDataset(info.sha or "", files)


def download_dataset(name: str, revision: str, files: list[str], folder: Path) -> None:
    """Download some files of a dataset into a folder; those it holds unchanged are kept.

    Raises:
        UserError: where the hub cannot be reached; not always, though, where the folder holds
            older files of these names.
    """
    from huggingface_hub import snapshot_download

    with _explained(f"dataset {name}"):
        snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            local_dir=folder,
            allow_patterns=files,
        )


def model_file(name: str, file: str) -> Path:
    """A file of a model repository: from the hub's local cache, else from the hub.

    Raises:
        UserError: where there is none, or it is not in the cache and the hub cannot be reached.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _explained(f"{file} of {name}"):
        try:
            return Path(hf_hub_download(name, file, local_files_only=True))
        except LocalEntryNotFoundError:
            HfApi().model_info(name, timeout=_TIMEOUT_SECONDS)  # fails fast: downloads try for 23 s
            return Path(hf_hub_download(name, file))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Tell the user what to do where the hub fails."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except RepositoryNotFoundError:
        raise UserError(
            f"{what}: not on the Hugging Face hub, or not for everyone; check the name, or log in"
            " with `hf auth login`"
        ) from None
    # RuntimeError and ValueError: the hub's Xet back end, and names that it cannot have.
    except (OSError, HTTPError, EntryNotFoundError, RuntimeError, ValueError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise UserError(f"{what}: not on the Hugging Face hub") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{what}: cannot be had from the Hugging Face hub ({reason}); check the connection and"
            " HF_HUB_OFFLINE, or copy its folder from a machine that has it"
        ) from error
