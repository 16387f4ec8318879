"""Runs to mirror, and a file system that fails after some uploads or downloads."""

from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem

from rungs.run.folder import RunFolder
from tests.support.written_checkpoints import write_checkpoint


def saved_run(folder: Path, steps: int = 2) -> RunFolder:
    """Write a run folder with the checkpoints of steps 1 to `steps`; the first is the best."""
    (folder / "checkpoints" / "imported").mkdir(parents=True)
    (folder / "checkpoints" / "imported" / "model.safetensors").write_bytes(bytes(1000))
    for name in ("model.json", "train.json", "metrics.jsonl", "train.log", "verifier.py"):
        (folder / name).write_text(name)
    run = RunFolder(folder)
    for step in range(1, steps + 1):
        save(run, step)
    return run


def save(run: RunFolder, step: int) -> Path:
    """Write a checkpoint of a run."""
    checkpoint = run.checkpoints / f"2026010{step}Z000000-step-{step:06d}"
    write_checkpoint(checkpoint, step, validation_loss=1.0 + step)
    return checkpoint


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files that a mirror has, by relative path."""
    return {
        name: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and (name := path.relative_to(folder).as_posix()) != "mirror.json"
        and not path.name.startswith(".")
    }


class Failing(LocalFileSystem):
    """Local files of which only some more can be moved; then there is no connection."""

    protocol = "failing"
    cachable = False
    left: ClassVar[int] = 10**9
    """How many more uploads or downloads work."""

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("failing://"))

    def put_file(self, *arguments: Any, **options: Any) -> None:
        self._count()
        super().put_file(*arguments, **options)

    def get_file(self, *arguments: Any, **options: Any) -> None:
        self._count()
        super().get_file(*arguments, **options)

    def cat_file(self, *arguments: Any, **options: Any) -> bytes:
        if Failing.left < 0:
            raise ConnectionError("no route to host")
        return bytes(super().cat_file(*arguments, **options))

    @staticmethod
    def _count() -> None:
        Failing.left -= 1
        if Failing.left < 0:
            raise ConnectionError("no route to host")
