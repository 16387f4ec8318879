"""Files and folders that outlive the machine, where the system can promise it."""

import os
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, would survive a power cut."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
