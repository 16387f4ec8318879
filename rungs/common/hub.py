"""The Hugging Face hub: the only module that uses its library, and, with `mirror`, the network."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.paths import is_inside
from rungs.common.strict_json import format_value

_TIMEOUT_SECONDS = 10
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MODEL_FILES = [
    *(*_WEIGHTS, "model-*.safetensors", "config.json", "generation_config.json", "tokenizer*"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.*", "vocab.json"),
    "merges.txt",
]
"""Patterns of the files of a model that are downloaded."""


MAIN = "main"
"""The revision that is meant if none is named."""
_UPLOADED_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "*.gguf"]
_NO_DOWNLOAD = "cannot be downloaded from the Hugging Face hub"
_ON_DOWNLOAD = (
    "check the connection and HF_HUB_OFFLINE, or copy its folder from a machine that has it"
)
_NO_UPLOAD = "cannot be uploaded to the Hugging Face hub"
_ON_UPLOAD = "check the connection, and that you may write there"


class NotOnHub(UserError):
    """The hub was reached and has no such file."""


class HubFile(NamedTuple):
    """A file of a repository."""

    bytes: int
    sha256: str | None
    """None if the hub has none. Every token file has one."""


class HubRepository(NamedTuple):
    """A dataset repository at one commit."""

    revision: str
    """The commit."""
    files: dict[str, HubFile]
    license: str | None
    configs: list[dict[str, Any]]
    """`configs` of its dataset card: the files of each configuration and split."""


def dataset_repository(name: str, revision: str | None = None) -> HubRepository:
    """Return the contents of a dataset repository. `revision` is a branch, tag or commit; None for
    the main branch. Raises UserError if there is no such dataset or the hub cannot be reached."""
    from huggingface_hub import HfApi

    with _hub_errors(f"dataset {name}"):
        info = HfApi().dataset_info(
            name, revision=revision, timeout=_TIMEOUT_SECONDS, files_metadata=True
        )
        files = {
            os.fspath(sibling.rfilename): HubFile(
                int(sibling.size or 0), sibling.lfs.sha256 if sibling.lfs else None
            )
            for sibling in info.siblings or []
        }
        card = info.card_data.to_dict() if info.card_data else {}
    if outside := next((file for file in files if not is_inside(file)), None):
        raise UserError(
            f"dataset {name}: lists the file {format_value(outside)}, which is outside the"
            " repository"
        )
    licenses = card.get("license") or []
    listed = ", ".join(map(str, licenses if isinstance(licenses, list) else [licenses]))
    return HubRepository(str(info.sha or ""), files, listed or None, card.get("configs") or [])


def dataset_file(name: str, revision: str, file: str, folder: Path) -> Path:
    """Download a file of a dataset into a folder and return its path. A partial download is
    continued. Raises UserError if the hub cannot be reached."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(f"{file} of dataset {name}"):
        return Path(
            hf_hub_download(name, file, repo_type="dataset", revision=revision, local_dir=folder)
        )


def download_dataset(name: str, revision: str, files: list[str], folder: Path) -> None:
    """Download files of a dataset into a folder. Unchanged files are kept. Raises UserError if the
    hub cannot be reached, but may not notice if the folder holds older versions of these files."""
    from huggingface_hub import snapshot_download

    with _hub_errors(f"dataset {name}"):
        snapshot_download(
            name, repo_type="dataset", revision=revision, local_dir=folder, allow_patterns=files
        )


def model_file(name: str, file: str) -> Path:
    """Return the path of a model repository's file, from the hub's local cache or downloaded.
    Raises NotOnHub if there is no such file, UserError if there is no such repository, or the file
    is not cached and the hub cannot be reached."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _hub_errors(f"{file} of {name}"):
        try:
            return Path(hf_hub_download(name, file, local_files_only=True))
        except LocalEntryNotFoundError:
            HfApi().model_info(name, timeout=_TIMEOUT_SECONDS)  # fails fast: downloads try for 23 s
            return Path(hf_hub_download(name, file))


def download_model(name: str, revision: str | None = None) -> tuple[Path, str]:
    """Download the weights, configs and tokenizer of a published model into the hub's local cache;
    return the folder and the commit. Without a network, the cache is used. `revision` is a branch,
    tag or commit; None for the main branch. Raises UserError if there is no such model, it is not
    cached and the hub cannot be reached, or its weights have no supported format."""
    from huggingface_hub import snapshot_download

    with _hub_errors(f"model {name}"):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_MODEL_FILES))
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise UserError(
            f"model {name}: has no safetensors weights; look on the hub for a revision that has"
            " them (--revision), or convert PyTorch files in a Python with PyTorch:"
            f' AutoModelForCausalLM.from_pretrained("{name}").save_pretrained("NEW_FOLDER"), and'
            " the same for AutoTokenizer"
        )
    return folder, folder.name


def require_login(what: str) -> str:
    """Return the name of the logged-in user. Raises UserError, which says that `what` needs a
    login, if nobody is logged in."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        return str(HfApi().whoami()["name"])
    except LocalTokenNotFoundError:
        pass
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
    raise UserError(
        f"{what}: needs a login to the Hugging Face hub; log in with `hf auth login`, or set"
        " HF_TOKEN to a token that may write"
    )


def upload_model(
    name: str, revision: str, folder: Path, *, is_private: bool
) -> tuple[str, list[str]]:
    """Upload a folder as a revision of a model repository, in one commit, unless the hub has the
    same. Return the repository's address, and how the revision then differs from the folder.
    Weights of an earlier upload are deleted. Raises UserError if the hub refuses it or cannot be
    reached. `name` is `owner/name`; a repository that is created is private if `is_private`."""
    from huggingface_hub import HfApi

    with _hub_errors(f"model {name}", _NO_UPLOAD, _ON_UPLOAD):
        address = HfApi().create_repo(name, private=is_private, exist_ok=True)
        if revision != MAIN:
            # from a commit without weights: while the upload lasts, nobody gets those of main
            first = HfApi().list_repo_commits(name)[-1].commit_id
            HfApi().create_branch(name, branch=revision, revision=first, exist_ok=True)
        if _differences(name, revision, folder):
            HfApi().upload_folder(
                repo_id=name,
                revision=revision,
                folder_path=folder,
                commit_message="Upload a model trained with Rungs",
                delete_patterns=_UPLOADED_WEIGHTS,
            )
        return str(address), _differences(name, revision, folder)


def _differences(name: str, revision: str, folder: Path) -> list[str]:
    """Return how a revision differs from a folder, by the checksums that the hub lists. Files of
    the hub alone count if they are weights."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    found = HfApi().verify_repo_checksums(name, revision=revision, local_dir=folder)
    others = filter_repo_objects(found.missing_paths, allow_patterns=_UPLOADED_WEIGHTS)
    changed = [
        f"{one['path']} has {one['algorithm']} {one['expected']}, here {one['actual']}"
        for one in found.mismatches
    ]
    lacking = [f"{path} is missing" for path in found.extra_paths]
    strange = [f"{path} is not of this model" for path in others]
    return [f"{name}, {revision}: {one}" for one in [*changed, *lacking, *strange]]


def check_upload(name: str) -> None:
    """Raise UserError if an upload cannot work: the name is not `owner/name`, nobody is logged in,
    or the hub can't be reached."""
    if name.count("/") != 1:
        raise UserError(f"{name}: must be the name of a repository on the hub, OWNER/NAME")
    with _hub_errors(f"model {name}", _NO_UPLOAD, _ON_UPLOAD):
        require_login(f"model {name}")


def is_repository(url: str) -> bool:
    """Whether a URL is a folder in a repository of the hub rather than in a bucket."""
    return url.startswith("hf://") and not url.startswith("hf://buckets/")


def upload_to_repository(url: str, folder: Path, message: str) -> None:
    """Upload a folder's files in one commit with this message, creating a private repository if
    needed. Raises the errors of the hub's library. `url` is `hf://owner/name/folder` or
    `hf://datasets/owner/name/folder`."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    parts = url.removeprefix("hf://").split("/")
    kind = parts.pop(0).removesuffix("s") if parts[0] in ("datasets", "spaces") else "model"
    name, place = "/".join(parts[:2]), "/".join(parts[2:])
    api = HfApi()
    api.create_repo(name, repo_type=kind, private=True, exist_ok=True)
    api.upload_folder(
        repo_id=name,
        repo_type=kind,
        folder_path=folder,
        path_in_repo=place or None,
        commit_message=message,
    )


@contextlib.contextmanager
def _hub_errors(
    what: str, failed: str = _NO_DOWNLOAD, advice: str = _ON_DOWNLOAD
) -> Iterator[None]:
    """Turn errors of the hub into a UserError that says what to do."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        folder = "datasets/" if "dataset " in what else ""
        page = f"https://huggingface.co/{folder}{what.rsplit(' ', 1)[-1]}"
        raise UserError(
            f"{what}: its owner grants access on request: ask on {page}, then log in with"
            " `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{what}: not on the Hugging Face hub, or not public; check the name, or log in with"
            " `hf auth login`"
        ) from None
    except UserError:
        raise
    # RuntimeError and ValueError: from the Xet back end of the hub, and for invalid names.
    except (OSError, HTTPError, EntryNotFoundError, RuntimeError, ValueError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise NotOnHub(f"{what}: not on the Hugging Face hub") from None
        if full := disk.reason_of_no_space(error):
            raise RunFailure(
                f"{what}: cannot be downloaded: {full}; free some space, then run this again"
            ) from None
        raise UserError(f"{what}: {failed} ({reason(error)}); {advice}") from error
