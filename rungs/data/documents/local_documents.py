"""A dataset from the user's own files of documents."""

from collections.abc import Sequence
from pathlib import Path

from rungs.common.errors import UserError
from rungs.common.paths import require_regular
from rungs.data.dataset import Source
from rungs.data.documents import building
from rungs.data.documents.building import Request
from rungs.data.documents.files import DataFile
from rungs.data.documents.reading import Format, format_of
from rungs.data.tokenizer import Tokenizer


def request(
    files: Sequence[Path],
    kind: Format,
    tokenizer: Tokenizer | int,
    column: str | None,
    validation_percent: float,
    max_bytes: int | None,
) -> Request:
    """Return what to build from files; raises UserError if one is missing or of another format."""
    return Request(
        files=[_data_file(path, kind) for path in dict.fromkeys(files)],
        tokenizer=tokenizer,
        column=column,
        validation_percent=validation_percent,
        max_bytes=max_bytes,
    )


def _data_file(path: Path, kind: Format) -> DataFile:
    try:
        require_regular(path)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if format_of(path.name) != kind:
        raise UserError(f"{path}: its name does not end as that of a file of {kind} does")
    return DataFile(str(path), size, None, None)


def build(folder: Path, request: Request) -> Source:
    """Tokenize files into a folder, which may have a part of them; see `building.build`."""
    return building.build(folder, request, lambda file: Path(file.name))
