"""Checkpoints on another disk than the rest of the run."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.integrations.mirroring import restore_if_empty
from rungs.run.folder import RunFolder
from tests.faults.short_runs import short_run, train_here
from tests.faults.tmpfs import needs_mount, tmpfs
from tests.support.tiny_run import assert_same_outcome, change, losses


@pytest.fixture(params=["the same disk", pytest.param("another disk", marks=needs_mount)])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunFolder]:
    """A run whose `checkpoints` are elsewhere, beside files that are not its own."""
    run = short_run(tmp_path / "run")
    place = tmp_path / "elsewhere"
    with tmpfs(place, 20_000_000) if request.param == "another disk" else nullcontext():
        (place / "mine").mkdir(parents=True)
        (place / "mine" / "notes.txt").write_text("mine")
        run.checkpoints.symlink_to(place / "mine")
        yield run
        assert (place / "mine" / "notes.txt").read_text() == "mine"
        assert run.checkpoints.is_symlink()


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_run_starts_over_and_goes_back(
    linked: RunFolder, uninterrupted: RunFolder, datasets_dir: Path
) -> None:
    with linked.lock() as own:
        assert train_here(own, datasets_dir) == 0
        assert_same_outcome(own, uninterrupted)
        assert train_here(own, datasets_dir, rewind_to="step-000003") == 0
        assert train_here(own, datasets_dir, fresh=True) == 0
        assert_same_outcome(own, uninterrupted)
    first, second = sorted(own.aside.iterdir())
    assert [c.step for c in list_checkpoints(first / "checkpoints")] == [6, 7]
    assert [c.step for c in list_checkpoints(second / "checkpoints")] == [0, 3, 6, 7]
    assert all(not c.damage() for c in list_checkpoints(second / "checkpoints"))
    assert losses(RunFolder(second)) == losses(uninterrupted)


def test_a_mirror_is_restored(linked: RunFolder, uninterrupted: RunFolder, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(uninterrupted.path, mirror, symlinks=True)
    (mirror / "mirror.json").write_text('{"run": "0123456789abcdef0123456789abcdef", "copied": {}}')
    restore_if_empty(linked, str(mirror), lambda _: None)
    assert_same_outcome(linked, uninterrupted)
    assert not [path for path in linked.checkpoints.iterdir() if path.name.startswith(".")]


@pytest.mark.long
def test_an_old_checkpoint_that_is_a_link(
    uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    """It can be resumed from, moves aside, and what it points to stays."""
    run = RunFolder(shutil.copytree(uninterrupted.path, tmp_path / "run", symlinks=True))
    last = list_checkpoints(run.checkpoints)[-1]
    last.folder.rename(tmp_path / last.folder.name)
    last.folder.symlink_to(Path("..", "..", last.folder.name))
    with run.lock() as own:
        assert train_here(own, datasets_dir) == 0
        assert train_here(own, datasets_dir, rewind_to="step-000003") == 0
    (aside,) = run.aside.iterdir()
    assert [c.step for c in list_checkpoints(aside / "checkpoints")] == [6, 7]
    assert_same_outcome(run, uninterrupted)
    assert (tmp_path / last.folder.name / "meta.json").exists()


@contextmanager
def image(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder that is a layer of an image, and one where a container sees its content."""
    with tmpfs(folder, 50_000_000):
        layer, changes, work, seen = (folder / name for name in ("layer", "new", "work", "seen"))
        for each in (layer, changes, work, seen):
            each.mkdir()
        yield layer, seen
        subprocess.run(["umount", "--lazy", str(seen)], check=True)


def start_container(layer: Path, seen: Path) -> None:
    folders = f"lowerdir={layer},upperdir={layer.parent}/new,workdir={layer.parent}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", folders, "overlay", str(seen)], check=True)


@needs_mount
@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_run_in_the_image_of_a_container(
    uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    """Folders of an image can't be renamed in a container."""
    with image(tmp_path / "disk") as (layer, seen):
        shutil.copytree(uninterrupted.path, layer / "run", symlinks=True)
        shutil.rmtree(list_checkpoints(layer / "run" / "checkpoints")[-1].folder)
        start_container(layer, seen)
        run = RunFolder(seen / "run")
        change(run, keep_checkpoints=1)
        with run.lock() as own:
            assert train_here(own, datasets_dir) == 0
            assert_same_outcome(own, uninterrupted)
            assert len(list_checkpoints(own.checkpoints)) <= 2
            assert train_here(own, datasets_dir, fresh=True) == 0
            assert_same_outcome(own, uninterrupted)
        assert len(list(run.aside.iterdir())) == 1


@needs_mount
@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_checkpoints_in_another_mount_of_the_same_disk(
    uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(uninterrupted.path, tmp_path / "run", symlinks=True))
    run.checkpoints.rename(tmp_path / "volume")
    run.checkpoints.mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path / "volume"), str(run.checkpoints)], check=True)
    try:
        with run.lock() as own:
            for options in ({"rewind_to": "step-000003"}, {"fresh": True}):
                assert train_here(own, datasets_dir, **options) == 0
                assert_same_outcome(own, uninterrupted)
        first, second = sorted(run.aside.iterdir())
        assert [c.step for c in list_checkpoints(first / "checkpoints")] == [6, 7]
        assert [c.step for c in list_checkpoints(second / "checkpoints")] == [0, 3, 6, 7]
        assert all(not c.damage() for c in list_checkpoints(second / "checkpoints"))
    finally:
        subprocess.run(["umount", "--lazy", str(run.checkpoints)], check=True)
