"""File systems that are full, small or read-only, for tests to write on."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

KIBIBYTE = 1024


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes at a folder."""
    with _mounted(folder, f"size={size // KIBIBYTE}k"):
        yield folder


def grow(folder: Path, size: int) -> None:
    """Give a small disk another size."""
    _mount(folder, f"remount,size={size // KIBIBYTE}k")


def make_read_only(folder: Path) -> None:
    """Let nothing more be written to a small disk."""
    _mount(folder, "remount,ro")


def make_writable(folder: Path) -> None:
    _mount(folder, "remount,rw")


def free_bytes(folder: Path) -> int:
    found = subprocess.run(
        ["stat", "-f", "-c", "%a %S", str(folder)], check=True, capture_output=True, text=True
    )
    blocks, size = map(int, found.stdout.split())
    return blocks * size


def can_mount() -> bool:
    """Whether this user may mount a file system here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _mounted(Path(folder), "size=64k"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, options)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(folder: Path, options: str) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        check=True,
        capture_output=True,
    )


needs_mount = pytest.mark.skipif(not can_mount(), reason="needs the right to mount a file system")
