"""Lines of JSON in a section of a file, and the errors that name them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rungs.common.errors import UserError
from rungs.data.text_dataset import TextSection

_BLOCK_BYTES = 1 << 20


def json_lines(section: TextSection) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a section that are not blank, each with the offset of its first byte."""
    offset = section.start
    with section.path.open("rb") as file:
        file.seek(offset)
        while offset < section.end and (line := file.readline()):
            if line.strip():
                yield offset, line
            offset += len(line)


def parse_json(line: bytes, make_object: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Return the value of a line, with each object made of its keys and values by `make_object`.
    Raises ValueError with the reason if it is not JSON."""
    try:
        return json.loads(line.rstrip().decode(), object_pairs_hook=make_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text, near byte {error.start + 1}; convert it first") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON at column {error.colno}: {error.msg}") from None
    except RecursionError as error:
        raise ValueError(f"unreadable JSON: {error}") from None


def line_error(path: Path, offset: int, problem: str) -> UserError:
    """Return the error of a line, which starts at an offset in a file."""
    number = 1
    with path.open("rb") as file:
        while offset and (block := file.read(min(offset, _BLOCK_BYTES))):
            number += block.count(b"\n")
            offset -= len(block)
    return UserError(f"{path}: line {number}: {problem}")
