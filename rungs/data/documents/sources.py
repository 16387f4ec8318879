"""Where the files of documents are from: a repository on the Hugging Face hub, or the user."""

from collections.abc import Iterable
from pathlib import Path

from rungs.common import disk, hub
from rungs.common.errors import UserError
from rungs.common.paths import require_regular
from rungs.data.dataset import Source
from rungs.data.documents import building
from rungs.data.documents.building import Request
from rungs.data.documents.files import FILES_AHEAD, Choice, DataFile, choose
from rungs.data.documents.reading import Format, format_of

_TEXT_PER_BYTE = {"parquet": 2.5, "json lines": 1.0, "plain text": 1.0}
_COMPRESSION = 3.5
"""Bytes of text in a byte of a file, and in one of a compressed one; as FineWeb has them."""
_BYTES_PER_TOKEN = 4


def local_files(paths: Iterable[Path], kind: Format) -> list[DataFile]:
    """Return the user's files; raises UserError if one is missing or of another format."""
    found = []
    for path in dict.fromkeys(paths):
        try:
            require_regular(path)
            found.append(DataFile(str(path), path.stat().st_size, None, None))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if format_of(path.name) != kind:
            raise UserError(f"{path}: its name does not end like the name of a file of {kind}")
    return found


def build_from_local_files(folder: Path, request: Request) -> Source:
    """Tokenize the user's files into a folder; see `building.build`."""
    return building.build(folder, request, lambda file: Path(file.name))


def hub_files(name: str, repository: hub.HubRepository, choice: Choice) -> list[DataFile]:
    """Return the chosen files of a repository; raises UserError if it has none."""
    files = {file: (found.bytes, found.sha256) for file, found in repository.files.items()}
    try:
        return choose(files, repository.configs, choice)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def build_from_hub(folder: Path, request: Request) -> Source:
    """Download and tokenize the files of a repository into a folder; see `building.build`. Each
    file is deleted after it was read."""
    repository, revision = request.repository, request.revision
    assert repository is not None
    assert revision is not None
    _check_space(folder, request)

    def fetch(file: DataFile) -> Path:
        return hub.dataset_file(repository, revision, file.name, folder / building.DOWNLOADS)

    return building.build(folder, request, fetch, keep=False)


def _check_space(folder: Path, request: Request) -> None:
    """Raise UserError if the token files and the downloads ahead will hardly fit on the disk."""
    texts = sum(map(_text_bytes, request.files))
    if request.max_bytes is not None:
        texts = min(texts, request.max_bytes)
    size = 2 if isinstance(request.tokenizer, int) or request.tokenizer.vocab_size <= 1 << 16 else 4
    waiting = sum(sorted(file.bytes for file in request.files)[-1 - FILES_AHEAD :])
    needed, free = texts / _BYTES_PER_TOKEN * size + waiting, disk.free_bytes(folder)
    if needed > free:
        raise UserError(
            f"{request.repository}: about {needed / 1e9:,.1f} GB needed, {free / 1e9:,.1f} GB free"
            f" at {folder.parent}; free some, or take a part with --max-bytes or --files"
        )


def _text_bytes(file: DataFile) -> float:
    """Return about how much text a file has."""
    kind = format_of(file.name)
    assert kind is not None
    is_compressed = kind != "parquet" and file.name.endswith((".gz", ".zst"))
    return file.bytes * (_COMPRESSION if is_compressed else _TEXT_PER_BYTE[kind])
