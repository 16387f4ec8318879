"""File systems in memory (tmpfs) that tests can fill up, resize and make read-only."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of so many bytes at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, f"size={size // 1024}k")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resize(folder: Path, size: int) -> None:
    _mount(folder, f"remount,size={size // 1024}k")


def make_read_only(folder: Path) -> None:
    _mount(folder, "remount,ro")


def make_writable(folder: Path) -> None:
    _mount(folder, "remount,rw")


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tmpfs(Path(folder), 65_536):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


needs_mount = pytest.mark.skipif(not _can_mount(), reason="needs permission to mount")
