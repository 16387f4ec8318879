"""The new lines of a file that another process appends to, or replaces."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rungs.common.paths import is_file, open_to_read

_LINES_AT_ONCE = 10_000


class GrowingFile:
    """A file of lines that another process appends to; it may not exist yet. `is_replaced` tells
    that it was replaced, truncated or removed since the last call, so earlier lines are void."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_replaced = False
        self._inode, self._offset = 0, 0

    def new_lines(self) -> Iterator[list[bytes]]:
        """Yield the complete lines added since the last call, in lists of some thousands; all lines
        if the file was replaced. Raises UserError if it exists and can't be read."""
        if not is_file(self.path):
            self.is_replaced = self._offset > 0
            self._inode, self._offset = 0, 0
            return
        with open_to_read(self.path) as file:
            status = os.fstat(file.fileno())
            self.is_replaced = self._offset > 0 and (
                status.st_ino != self._inode or status.st_size < self._offset
            )
            if self.is_replaced:
                self._offset = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            while lines := list(islice(file, _LINES_AT_ONCE)):
                if not lines[-1].endswith(b"\n"):  # still being written, or torn
                    lines.pop()
                self._offset += sum(map(len, lines))
                if lines:
                    yield lines
