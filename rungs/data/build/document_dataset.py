"""Build a dataset from files of documents as a stream that can be killed and resumed. Progress is
saved now and then, after the data it counts is on disk. The next start truncates the token files to
it and continues with the next row, so the bytes are the same however often it was killed."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import Field

from rungs.common import disk, errors, run_log, strict_json
from rungs.common.run_log import log
from rungs.data.build import document_files
from rungs.data.build.document_files import DataFile, FetchedFile, fetch_ahead
from rungs.data.build.sections import (
    NO_TEXT,
    log_texts,
    stable_hash,
    token_dtype,
)
from rungs.data.text.batch_encoder import BatchEncoder
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer, save_tokenizer
from rungs.data.tokens.dataset import (
    SPLITS,
    TRAIN,
    DocumentFile,
    Documents,
    Source,
    Split,
    split_file,
)
from rungs.data.tokens.token_file import TokenWriter

_DOWNLOADS = ".downloads"
"""Folder of downloaded files that are not read yet."""
_BATCH_BYTES, _BATCH_ROWS = 8 << 20, 1 << 14
_SAVED_BATCHES = 8
"""Batches between two saves of progress."""
_TRAINING_CHARACTERS = 32 << 20
"""Characters, from the start of the first file, that a tokenizer is trained on."""

T = TypeVar("T")


class Request(NamedTuple):
    """The dataset to build."""

    files: Sequence[DataFile]
    tokenizer: Tokenizer | int
    """The tokenizer, or the vocabulary size of a tokenizer to train."""
    column: str | None
    """Column with the text; None for the default."""
    validation_percent: float
    """Percentage of the documents in files without a split; equal documents get the same split."""
    max_bytes: int | None
    """Maximum text in UTF-8; the document that reaches it is the last."""
    repository: str | None = None
    """Name on the hub."""
    revision: str | None = None
    license: str | None = None

    @property
    def checksum(self) -> str:
        """Checksum that is equal for requests that give the same token files."""
        tokenizer, content = self.tokenizer, self._asdict()
        if not isinstance(tokenizer, int):
            content["tokenizer"] = tokenizer.definition
            if tokenizer.begin or tokenizer.eos_token:
                content["texts"] = [tokenizer.begin, tokenizer.end_of_text]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Progress(strict_json.StrictModel):
    """The contents of `progress.json`: how much of an unfinished dataset's token files is valid."""

    FILE: ClassVar = "progress.json"

    request: str
    finished: list[DocumentFile] = Field(default_factory=list)
    """Files that are done."""
    rows: int = 0
    """Finished rows of the next file, with or without text."""
    documents: int = 0
    """Finished documents of the next file."""
    empty: int = 0
    """Rows without text, in all files."""
    text_bytes: int = 0
    """Bytes of all documents in UTF-8."""
    tokens: dict[Split, int] = Field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, request: str) -> "Progress":
        """Return the folder's progress with a request; none if it belongs to another request."""
        path = folder / cls.FILE
        try:
            found = strict_json.parse(strict_json.read_text(path), path, cls)
        except errors.UserError:
            return cls(request=request)
        return found if found.request == request else cls(request=request)

    def save(self, folder: Path) -> None:
        """Write the file atomically; raises OSError."""
        disk.replace_file(folder / self.FILE, self.model_dump_json())


def build(folder: Path, request: Request) -> Source:
    """Write the token files and the tokenizer into a folder, which may hold part of them. A
    repository's files are downloaded a few ahead, and each is deleted after it was read. Raises
    UserError if a file cannot be read or downloaded, or a split has no text; without progress that
    could be continued, the folder is then removed."""
    try:
        return _build(folder, request)
    except errors.UserError:
        if not (folder / Progress.FILE).exists():
            disk.remove(folder)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove from a finished dataset's folder the files of an unfinished one."""
    (folder / Progress.FILE).unlink(missing_ok=True)
    disk.try_to_remove(folder / _DOWNLOADS)


def _build(folder: Path, request: Request) -> Source:
    progress = Progress.of(folder, request.checksum)
    if progress.text_bytes:
        log.info("going on after %s bytes of text", f"{progress.text_bytes:,}")
    fetch = document_files.fetcher(request.repository, request.revision, folder / _DOWNLOADS)
    left, is_local = request.files[len(progress.finished) :], request.repository is None
    with ExitStack() as stack:
        fetched = stack.enter_context(closing(fetch_ahead(left, fetch, keep=is_local)))
        first = next(fetched, None)
        tokenizer = _tokenizer(folder, request, progress, first)
        builder = _Builder(folder, request, tokenizer, progress, stack)
        for file in itertools.chain([first] if first else [], fetched):
            if builder.add_file(file):
                break
    return builder.finish()


def _tokenizer(
    folder: Path, request: Request, progress: Progress, first: FetchedFile | None
) -> Tokenizer:
    """Return the tokenizer: the given one, or one trained on the first texts."""
    if not isinstance(request.tokenizer, int):
        save_tokenizer(request.tokenizer, folder)
    elif first and not progress.finished and not progress.rows:
        found = document_files.read(first.path, first.file.name, request.column)
        tokenizer = train_bpe(_first_texts(found), request.tokenizer)
        save_tokenizer(tokenizer, folder)
    return load_tokenizer(folder)


def _first_texts(rows: Iterator[str | None]) -> Iterator[str]:
    characters = 0
    for text in filter(None, rows):
        yield text
        characters += len(text)
        if characters >= _TRAINING_CHARACTERS:
            return


class _Batch(NamedTuple):
    rows: int
    texts: list[str]
    bytes: int


class _Builder:
    def __init__(
        self,
        folder: Path,
        request: Request,
        tokenizer: Tokenizer,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self._folder, self._request, self._progress = folder, request, progress
        self._encoder, self._tokenizer = BatchEncoder(tokenizer), tokenizer
        dtype = token_dtype(tokenizer.vocab_size)
        texts = log_texts(tokenizer, tokenizer.end_of_text)
        self._writers = {
            split: stack.enter_context(
                TokenWriter(folder / split_file(split), dtype, texts, progress.tokens.get(split, 0))
            )
            for split in SPLITS
        }
        self._reader = stack.enter_context(ThreadPoolExecutor(1))
        total = request.max_bytes or sum(file.bytes for file in request.files)
        self._bar = stack.enter_context(run_log.byte_progress("tokenizing", total))

    def add_file(self, fetched: FetchedFile) -> bool:
        """Append a file's remaining documents; return whether `max_bytes` is reached."""
        file, most = fetched.file, self._request.max_bytes
        column, done = self._request.column, self._progress.rows
        rows = document_files.read(fetched.path, file.name, column, done)
        room = None if most is None else most - self._progress.text_bytes
        batches = _ahead(self._reader, _batches(rows, room))
        for number, batch in enumerate(batches, 1):
            self._add(batch, file.split)
            if number % _SAVED_BATCHES == 0:
                self._save()
        finished = DocumentFile(
            name=file.name,
            bytes=file.bytes,
            sha256=fetched.sha256,
            documents=self._progress.documents,
        )
        self._update(finished=[*self._progress.finished, finished], rows=0, documents=0)
        self._save()
        return most is not None and self._progress.text_bytes >= most

    def _add(self, batch: _Batch, split: Split | None) -> None:
        begin, end_of_text = self._tokenizer.begin, self._tokenizer.end_of_text
        end = [] if end_of_text is None else [end_of_text]
        held_out = self._request.validation_percent / 100 * 2**64
        for text, ids in zip(batch.texts, self._encoder.encode(batch.texts), strict=True):
            by_text: Split = "validation" if stable_hash(text) < held_out else "train"
            writer = self._writers[split or by_text]
            for part in (begin, ids, end):
                writer.append(part)
        progress = self._progress
        self._update(
            rows=progress.rows + batch.rows,
            documents=progress.documents + len(batch.texts),
            empty=progress.empty + batch.rows - len(batch.texts),
            text_bytes=progress.text_bytes + batch.bytes,
        )
        self._bar.update(batch.bytes)

    def _update(self, **changes: object) -> None:
        self._progress = self._progress.model_copy(update=changes)

    def _save(self) -> None:
        for writer in self._writers.values():
            writer.flush()
        self._update(tokens={split: writer.tokens for split, writer in self._writers.items()})
        self._progress.save(self._folder)

    def finish(self) -> Source:
        """Complete the token files and return the dataset's source. Raises UserError, and removes
        the progress, if a split has no text: with the same request it never has."""
        expected = {file.split for file in self._request.files}
        wants_validation = self._request.validation_percent > 0 and None in expected
        for split, writer in self._writers.items():
            if writer.tokens:
                continue
            if split == TRAIN or wants_validation or split in expected:
                (self._folder / Progress.FILE).unlink(missing_ok=True)
                raise errors.UserError(NO_TEXT.format(split))
            (self._folder / split_file(split)).unlink()
        progress, request = self._progress, self._request
        found = Documents(
            request=request.checksum,
            repository=request.repository,
            license=request.license,
            column=request.column,
            files=progress.finished,
            rows_without_text=progress.empty,
            text_bytes=progress.text_bytes,
        )
        return Source(kind="documents", revision=request.revision, documents=found)


def _batches(rows: Iterator[str | None], room: int | None) -> Iterator[_Batch]:
    """Yield rows in batches until their texts reach `room` bytes."""
    texts: list[str] = []
    count = size = 0
    for row in rows:
        count += 1
        if row:
            texts.append(row)
            size += len(row.encode())
        is_last = room is not None and size >= room
        if is_last or size >= _BATCH_BYTES or count >= _BATCH_ROWS:
            yield _Batch(count, texts, size)
            if is_last:
                return
            room = room and room - size
            texts, count, size = [], 0, 0
    if count:
        yield _Batch(count, texts, size)


def _ahead(reader: ThreadPoolExecutor, items: Iterator[T]) -> Iterator[T]:
    """Yield items, computing the next one meanwhile."""
    coming = reader.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = reader.submit(next, items, None)
        yield item
