"""Get files of documents, a few of them ahead of the one that is being read."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rungs.common.errors import UserError
from rungs.data.documents.files import DataFile

FILES_AHEAD = 3
"""Files on the way or waiting, besides the one that is being read."""

Fetch = Callable[[DataFile], Path]
"""Returns the path of a file on this machine, after a download if it isn't there."""


class FetchedFile(NamedTuple):
    """A file on this machine."""

    file: DataFile
    path: Path
    sha256: str


def fetch_ahead(
    files: Sequence[DataFile], fetch: Fetch, keep: bool = True
) -> Generator[FetchedFile, None, None]:
    """Yield files in order, while the next ones are being fetched.

    Args:
        keep: whether a file stays where it is after it was read.

    Raises:
        UserError: a file cannot be fetched, or is not the one that the hub says it is.
    """
    with ThreadPoolExecutor(FILES_AHEAD) as pool:
        coming: deque[Future[FetchedFile]] = deque()
        remaining = iter(files)
        try:
            for file in remaining:
                coming.append(pool.submit(_fetch, file, fetch))
                if len(coming) > FILES_AHEAD:
                    yield from _next(coming, keep)
            while coming:
                yield from _next(coming, keep)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _next(coming: deque[Future[FetchedFile]], keep: bool) -> Iterator[FetchedFile]:
    found = coming.popleft().result()
    yield found
    if not keep:
        found.path.unlink(missing_ok=True)


def _fetch(file: DataFile, fetch: Fetch) -> FetchedFile:
    path = fetch(file)
    try:
        with path.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file.name}: cannot be read: {error.strerror}") from None
    if file.sha256 not in (None, sha256):
        path.unlink()
        raise UserError(f"{file.name}: was not downloaded correctly; run the same command again")
    return FetchedFile(file, path, sha256)
