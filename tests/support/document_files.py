"""Small files of documents."""

import gzip
import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def parquet(rows_per_group: int = 3, **columns: Sequence[Any]) -> bytes:
    """Return a Parquet file with these columns."""
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=rows_per_group)
    return file.getvalue()


def json_lines(*rows: Any) -> bytes:
    """Return a file with a row of JSON on each line."""
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def compressed(content: bytes, compression: str) -> bytes:
    """Return the content compressed with gzip or zstd."""
    if compression == "gzip":
        return gzip.compress(content, mtime=0)
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def texts(count: int, seed: int = 0) -> list[str]:
    """Return different texts of a few words."""
    words = ["one", "two", "three", "four", "five", "grün", "日本", "\n", "x = 1"]
    return [
        " ".join(words[(number * 7 + place * place + seed) % len(words)] for place in range(9))
        + f" {seed}/{number}"
        for number in range(count)
    ]
