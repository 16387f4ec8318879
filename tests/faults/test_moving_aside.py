"""`--fresh` and `--from` killed between any two of their moves: no file is lost or half copied."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import read_checkpoint
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.resume import checkpoint_to_resume, move_aside


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def run(uninterrupted: RunFolder, tmp_path: Path) -> RunFolder:
    """A finished run with a chart."""
    run = RunFolder(shutil.copytree(uninterrupted.path, tmp_path / "run", symlinks=True))
    (run.path / "loss-chart.png").write_bytes(b"a chart")
    return run


@pytest.mark.long
@pytest.mark.parametrize("start", [StartOptions(fresh=True), StartOptions(rewind_to="step-000003")])
def test_a_run_resumes_after_a_crash_between_any_two_moves(
    start: StartOptions, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(run.path)
    count = 0
    while True:
        count += 1
        copy = RunFolder(tmp_path / f"copy-{count}")
        shutil.copytree(run.path, copy.path, symlinks=True)
        with monkeypatch.context() as patch:
            kill_at_change(count, patch)
            try:
                move_aside(copy, checkpoint_to_resume(copy, start))
            except Killed:
                pass
            else:
                break
        check_nothing_is_lost(copy, before)
        check_plain_start(RunFolder(shutil.copytree(copy.path, tmp_path / "p", symlinks=True)))
        shutil.rmtree(tmp_path / "p")
        move_aside(copy, checkpoint_to_resume(copy, start))
        check_nothing_is_lost(copy, before)
        if start.fresh:
            assert {path.name for path in copy.path.iterdir()} - {"train.lock"} == {
                *("model.json", "train.json", "checkpoints", "aside")
            }
            assert list(copy.checkpoints.iterdir()) == []
        else:
            assert list_checkpoints(copy.checkpoints)[-1].step == 3
        shutil.rmtree(copy.path)
    assert count > 5


def kill_at_change(count: int, patch: pytest.MonkeyPatch) -> None:
    """Stop before the `count`-th change on the disk; a copied file may be half copied."""
    changes = iter(range(1, 1000))

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            if next(changes) == count:
                if name == "copyfile":
                    Path(args[1]).write_bytes(Path(args[0]).read_bytes()[:10])
                raise Killed
            return original(*args, **kwargs)

        patch.setattr(owner, name, change)

    for name in ("rename", "unlink", "mkdir"):
        wrap(Path, name)
    wrap(shutil, "copyfile")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.suffix != ".lock"
    }


def check_nothing_is_lost(run: RunFolder, before: dict[str, bytes]) -> None:
    """Every file is complete in its place or in one of the folders in `aside/`."""
    places = [run.path, *run.aside.glob("[0-9]*")]
    for name, content in before.items():
        found = [(place / name).read_bytes() for place in places if (place / name).exists()]
        assert found, f"{name} is lost"
        assert set(found) == {content}, f"{name} is half copied"


def check_plain_start(run: RunFolder) -> None:
    """A start without options resumes the old run or begins a new one."""
    saved = checkpoint_to_resume(run, StartOptions())
    move_aside(run, saved)
    steps = [step.global_step for step in metrics.read(run.metrics)]
    if saved is None:
        assert not run.metrics.exists()
        assert not run.log.exists()
        assert run.charts == []
    else:
        assert read_checkpoint(saved.folder).damage() == []
        assert steps[: saved.step + 1] == list(range(saved.step + 1))
