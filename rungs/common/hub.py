"""The Hugging Face hub: every use of the network is in here."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rungs.common.errors import UserError
from rungs.common.paths import is_inside
from rungs.common.strict_json import format_value

_TIMEOUT_SECONDS = 10


class NotOnHub(UserError):
    """The hub was reached, and has no such file."""


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
    _refuse_escapes(f"dataset {name}", files)
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
        NotOnHub: where the repository has no such file.
        UserError: where there is no such repository, or the hub cannot be reached and the file is
            not in the cache.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _explained(f"{file} of {name}"):
        try:
            return Path(hf_hub_download(name, file, local_files_only=True))
        except LocalEntryNotFoundError:
            HfApi().model_info(name, timeout=_TIMEOUT_SECONDS)  # fails fast: downloads try for 23 s
            return Path(hf_hub_download(name, file))


def download_model(name: str, revision: str | None = None) -> tuple[Path, str]:
    """A published model in the hub's local cache: its weights, configs and tokenizer, downloaded
    where they are not there as the hub has them now. Without a network, what the cache has.

    Args:
        revision: a branch, tag or commit; the main branch where None.

    Returns:
        The folder, and the commit.

    Raises:
        UserError: where there is none, it cannot be reached and is not in the cache, or its weights
            are in no format that can be read.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

    with _explained(f"model {name}"):
        try:
            info = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_SECONDS)
        except RepositoryNotFoundError:
            raise
        except (OSError, HTTPError):
            if (cached := _cached_model(name, revision)) is None:
                raise
            return cached, cached.name
    files = [sibling.rfilename for sibling in info.siblings or []]
    _refuse_escapes(f"model {name}", files)
    weights = _weights_patterns(name, files)
    patterns = [*weights, *_MODEL_COMPANIONS]
    with _explained(f"model {name}"):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    return folder, folder.name


def _refuse_escapes(what: str, files: Iterable[str]) -> None:
    """Refuse a repository that lists a file outside of its folder."""
    if strange := next((file for file in files if not is_inside(file)), None):
        raise UserError(
            f"{what}: lists the file {format_value(strange)}, which is none of a repository"
        )


def _cached_model(name: str, revision: str | None) -> Path | None:
    """A model's folder in the local cache, where it has its config and weights."""
    from huggingface_hub import snapshot_download

    for known_by, patterns in _WEIGHTS_FORMATS:
        with contextlib.suppress(OSError):  # it is not there, or not whole
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*patterns, *_MODEL_COMPANIONS],
                    local_files_only=True,
                )
            )
            if (folder / known_by).is_file() and (folder / "config.json").is_file():
                return folder
    return None


_MODEL_COMPANIONS = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.json",
    "merges.txt",
]
_WEIGHTS_FORMATS = (
    ("model.safetensors", ["model.safetensors"]),
    ("model.safetensors.index.json", ["model.safetensors.index.json", "model-*.safetensors"]),
    ("pytorch_model.bin", ["pytorch_model.bin"]),
    ("pytorch_model.bin.index.json", ["pytorch_model.bin.index.json", "pytorch_model-*.bin"]),
)
"""The file by which weights in a format are known, and the patterns of all their files."""


def _weights_patterns(name: str, files: list[str]) -> list[str]:
    """What to download of a model's files to have its weights, once."""
    for known_by, patterns in _WEIGHTS_FORMATS:
        if known_by in files:
            return patterns
    raise UserError(
        f"model {name}: has no weights as safetensors or PyTorch files; look on the hub for a"
        " revision that has (--revision), or for a copy in that format"
    )


@contextlib.contextmanager
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
            raise NotOnHub(f"{what}: not on the Hugging Face hub") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{what}: cannot be had from the Hugging Face hub ({reason}); check the connection and"
            " HF_HUB_OFFLINE, or copy its folder from a machine that has it"
        ) from error
