"""Files that grow, and one line for files that can't be used."""

import errno
import os
from pathlib import Path

import pytest

from rungs.common import paths
from rungs.common.errors import RunFailure, UserError, system_error


def test_a_growing_file_yields_complete_lines_and_tells_that_it_was_replaced(
    tmp_path: Path,
) -> None:
    growing = paths.GrowingFile(tmp_path / "metrics.jsonl")
    assert list(growing.new_lines()) == []
    growing.path.write_bytes(b"one\ntwo\nthr")
    assert list(growing.new_lines()) == [[b"one\n", b"two\n"]]
    with growing.path.open("ab") as file:
        file.write(b"ee\n")
    assert list(growing.new_lines()) == [[b"three\n"]]
    assert not growing.is_replaced
    growing.path.write_bytes(b"four\n")
    assert list(growing.new_lines()) == [[b"four\n"]]
    assert growing.is_replaced
    growing.path.unlink()
    assert list(growing.new_lines()) == []
    assert growing.is_replaced


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError(), RunFailure, "memory does not suffice"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), RunFailure, "make the batch"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RunFailure, "free some space"),
        (PermissionError(errno.EACCES, "no", "a.json"), UserError, r"^a\.json: no; check"),
        (OSError(errno.ENAMETOOLONG, "long", "a.json"), UserError, r"^a\.json: long; check"),
        (OSError(errno.EIO, "broken", "a.json"), RunFailure, r"^a\.json: broken; check"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    error: Exception, kind: type[Exception], text: str
) -> None:
    reported = system_error(error)
    assert isinstance(reported, kind)
    with pytest.raises(kind, match=text):
        raise reported


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "bad"), ImportError("no module jax")])
def test_what_is_no_system_error_keeps_its_traceback(error: Exception) -> None:
    assert system_error(error) is None


def test_links_out_of_a_folder_are_refused_except_into_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "snapshots" / "1" / "model", tmp_path / "blobs" / "2"
    for path in (snapshot.parent, blob.parent):
        path.mkdir(parents=True)
    blob.touch()
    snapshot.symlink_to(blob)
    paths.refuse_link_out(snapshot)
    (tmp_path / "blobs" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link out of its folder"):
        paths.refuse_link_out(tmp_path / "blobs" / "link")
