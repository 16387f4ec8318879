"""A dataset from a repository of documents on the Hugging Face hub."""

import functools
from pathlib import Path

from rungs.common import disk, hub
from rungs.common.errors import UserError
from rungs.common.hub import HubRepository
from rungs.data.dataset import Source
from rungs.data.documents import building
from rungs.data.documents.building import Request
from rungs.data.documents.fetching import FILES_AHEAD
from rungs.data.documents.files import Choice, DataFile, choose
from rungs.data.documents.reading import format_of
from rungs.data.tokenizer import Tokenizer

_TEXT_PER_BYTE = {"parquet": 2.5, "json lines": 1.0, "plain text": 1.0}
_COMPRESSION = 3.5
"""Bytes of text in a byte of a file, and in one of a compressed one; as FineWeb has them."""
_BYTES_PER_TOKEN = 4


def request(
    name: str,
    repository: HubRepository,
    choice: Choice,
    tokenizer: Tokenizer | int,
    column: str | None,
    validation_percent: float,
    max_bytes: int | None,
) -> Request:
    """Return what to build from a repository; raises UserError if it has no such files."""
    files = {file: (found.bytes, found.sha256) for file, found in repository.files.items()}
    try:
        chosen = choose(files, repository.configs, choice)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return Request(
        files=chosen,
        tokenizer=tokenizer,
        column=column,
        validation_percent=validation_percent,
        max_bytes=max_bytes,
        repository=name,
        revision=repository.revision,
        license=repository.license,
    )


def build(folder: Path, request: Request) -> Source:
    """Download and tokenize files into a folder, which may have a part of them; see
    `building.build`. Each file is deleted after it was read."""
    _check_space(folder, request)
    fetch = functools.partial(_download, request, folder / building.DOWNLOADS)
    return building.build(folder, request, fetch, keep=False)


def _download(request: Request, folder: Path, file: DataFile) -> Path:
    assert request.repository is not None
    assert request.revision is not None
    return hub.dataset_file(request.repository, request.revision, file.name, folder)


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
