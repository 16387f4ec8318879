"""Free space where the file system doesn't say how much there is."""

import errno
import os
from pathlib import Path

import pytest

from rungs.common import disk


def test_a_disk_that_cannot_be_asked_is_taken_to_have_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("os.statvfs", fail)
    disk.check_free_space(tmp_path, "the checkpoint", 10**30)
    error = disk.write_failure(tmp_path, "the checkpoint", OSError(errno.ENOSPC, ""), 7)
    assert "No space left on device (7 bytes needed); free some space" in str(error)
