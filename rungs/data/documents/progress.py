"""`progress.json` in the folder of an unfinished dataset: how far its token files are right."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from rungs.common import disk, strict_json
from rungs.common.errors import UserError
from rungs.common.strict_json import StrictModel
from rungs.data.dataset import DocumentFile, Split


class Progress(StrictModel):
    """The contents of `progress.json`."""

    FILE: ClassVar = "progress.json"

    request: str
    """Checksum of what is built."""
    finished: list[DocumentFile] = Field(default_factory=list)
    """The files that are done."""
    rows: int = 0
    """Rows of the next file that are done, with or without text."""
    documents: int = 0
    """Documents of that file that are done."""
    empty: int = 0
    """Rows of all files without text."""
    text_bytes: int = 0
    """Of all documents, in UTF-8."""
    tokens: dict[Split, int] = Field(default_factory=dict)
    """In the token files."""

    @classmethod
    def of(cls, folder: Path, request: str) -> "Progress":
        """Return the progress of a request: none if the folder has none, or that of another."""
        path = folder / cls.FILE
        try:
            found = strict_json.parse(strict_json.read_text(path), path, cls)
        except UserError:
            return cls(request=request)
        return found if found.request == request else cls(request=request)

    def save(self, folder: Path) -> None:
        """Write the file, completely or not at all; raises OSError."""
        disk.replace_file(folder / self.FILE, self.model_dump_json(), durable=True)
