"""The rows of files of documents, whole and from a row on."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rungs.common.errors import UserError
from rungs.data.build.document_files import format_of, read
from tests.support.document_files import compressed, json_lines, parquet, texts

ROWS: list[str | None] = [*texts(8), None, "", *texts(3, 1)]
LINES = json_lines(*({"id": number, "text": text} for number, text in enumerate(ROWS)))
FILES = {
    "a.parquet": parquet(id=list(range(len(ROWS))), text=ROWS),
    "a.jsonl": LINES,
    "a.json": LINES,
    "a.jsonl.gz": compressed(LINES, "gzip"),
    "a.jsonl.zst": compressed(LINES, "zstd"),
}


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def rows_of(folder: Path, name: str, content: bytes, column: str | None = None) -> list[Any]:
    return list(read(write(folder, name, content), name, column))


@pytest.mark.parametrize("name", FILES)
def test_the_rows_of_a_file_are_read_from_any_row_on(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, FILES[name])
    for first in range(len(ROWS) + 2):
        assert list(read(path, name, None, first)) == ROWS[first:]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_all_kinds_of_text_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    content = parquet(text=pa.array(["one", None, "two"]).cast(kind))
    assert rows_of(tmp_path, "a.parquet", content) == ["one", None, "two"]


def test_the_only_column_of_text_needs_no_name(tmp_path: Path) -> None:
    assert rows_of(tmp_path, "a.parquet", parquet(id=[1, 2], story=["x", "y"])) == ["x", "y"]
    lines = json_lines({"id": 1, "story": "x"}, {"story": "y"})
    assert rows_of(tmp_path, "a.jsonl", lines) == ["x", "y"]


def test_another_column_is_read_if_it_is_named(tmp_path: Path) -> None:
    content = parquet(text=["no"], story=["x"])
    assert rows_of(tmp_path, "a.parquet", content, "story") == ["x"]
    lines = json_lines({"text": "no", "story": "x"})
    assert rows_of(tmp_path, "a.jsonl", lines, "story") == ["x"]


def test_plain_text_ends_at_ends_of_text(tmp_path: Path) -> None:
    content = "\ufeffone\ntwo\n<|endoftext|>\nthree<|endoftext|>four\n".encode()
    assert rows_of(tmp_path, "a.txt", content) == ["one\ntwo", "three", "four"]
    assert rows_of(tmp_path, "a.txt.gz", compressed(content, "gzip"))[1:] == ["three", "four"]


def test_plain_text_keeps_its_line_ends(tmp_path: Path) -> None:
    content = b"one\r\ntwo\rthree\r\n<|endoftext|>\r\nfour\n"
    assert rows_of(tmp_path, "a.txt", content) == ["one\r\ntwo\rthree", "four"]


def test_a_long_plain_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(400_000)]
    found = rows_of(tmp_path, "a.txt", "".join(lines).encode())
    assert "".join(found) == "".join(lines).strip("\n")
    assert len(found) == 5
    assert all(text.endswith("\n") and len(text) < 1 << 21 for text in found[:-1])


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.parquet", parquet(a=["x"], b=["y"], c=[1]), None, "choose a column .* text: a, b"),
        ("a.parquet", parquet(a=["x"], c=[1]), "c", '"c" has no text; columns with text: a'),
        ("a.parquet", parquet(a=["x"]), "b", '"b" is not there; columns with text: a'),
        (
            "a.parquet",
            parquet(text=["x"], txet=["y"]).replace(b"txet", b"text"),
            None,
            "has several columns text; rename all but one",
        ),
        ("a.parquet", parquet(a=[1]), None, "columns with text: none"),
        ("a.parquet", b"PAR1 nothing", None, "cannot be read: .*; is it complete?"),
        ("a.parquet", FILES["a.parquet"][:-20], None, "cannot be read"),
        ("a.jsonl.gz", FILES["a.jsonl.gz"][:-20], None, "cannot be read"),
        ("a.jsonl.zst", FILES["a.jsonl.zst"][:40], None, "cannot be read"),
        ("a.jsonl", LINES + b"{", None, f"line {len(ROWS) + 1}: malformed JSON"),
        ("a.jsonl", LINES + b"[1]", None, "no JSON object"),
        ("a.jsonl", LINES + b"null", None, "no JSON object"),
        ("a.jsonl", LINES + b'{"txt": "x"}', None, 'has no "text"; its keys: txt'),
        ("a.jsonl", LINES + b'{"text": 3}', None, '"text" is 3, which is no text'),
        ("a.jsonl", LINES + b'{"text": "\xff"}', None, "not UTF-8 text"),
        ("a.jsonl", json_lines({"a": "x", "b": "y"}), None, "choose a column"),
        ("a.jsonl", json_lines({"a": "x"}), "b", 'has no "b"; its keys: a'),
        ("a.txt", b"one\xfftwo", None, "not UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    tmp_path: Path, name: str, content: bytes, column: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(name)}: .*{message}") as error:
        rows_of(tmp_path, name, content, column)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("data/train-00000-of-00001.parquet", "parquet"),
        ("a.jsonl.gz", "json lines"),
        ("a.b.ndjson.zst", "json lines"),
        ("a.txt", "plain text"),
        ("A.JSONL.GZ", "json lines"),
        ("DATA.PARQUET", "parquet"),
        ("README.md", None),
        ("a.gz", None),
        ("LICENSE", None),
    ],
)
def test_a_name_says_the_format(name: str, expected: str | None) -> None:
    assert format_of(name) == expected
