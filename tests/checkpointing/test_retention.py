"""Which checkpoints stay: after each save, and before one that would not fit."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rungs.checkpointing.checkpoint_folder import (
    clean_up,
    delete_old,
    list_checkpoints,
    make_room,
    most_needed,
    unusable_checkpoints,
)
from rungs.common.disk import folder_bytes
from tests.support.written_checkpoints import flip_byte, write_checkpoint

LOSSES = {1: 2.0, 2: 2.5, 3: 2.4, 4: 2.3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of steps 1 (the best) to 4."""
    for step, loss in LOSSES.items():
        write_checkpoint(tmp_path / f"20260101Z00000{step}-step-00000{step}", step, loss)
    return tmp_path


Disk = Callable[[Path, float], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Make a folder a disk of so many bytes."""

    def limit(folder: Path, total: float) -> None:
        def usage(_: Path) -> SimpleNamespace:
            return SimpleNamespace(total=total, free=total - folder_bytes(folder))

        monkeypatch.setattr("rungs.common.disk.shutil.disk_usage", usage)

    return limit


@pytest.fixture
def space(folder: Path, disk: Disk) -> int:
    """The bytes of a checkpoint. The disk is full: only what is deleted becomes free."""
    total = folder_bytes(folder)
    disk(folder, total)
    return total // len(LOSSES)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def test_the_checkpoint_of_step_0_stays_unless_the_disk_has_no_room_for_it(
    tmp_path: Path, disk: Disk
) -> None:
    for step, loss in {0: 5.0, 1: 2.0, 2: 2.5, 3: 2.6}.items():
        write_checkpoint(tmp_path / f"20260101Z00000{step}-step-00000{step}", step, loss)
    size = folder_bytes(tmp_path) // 4
    delete_old(tmp_path, 1)
    assert steps(tmp_path) == [0, 1, 3]
    assert len(steps(tmp_path)) + 1 == most_needed(1)
    disk(tmp_path, 3.5 * size)
    make_room(tmp_path, 1, needed_bytes=size)
    assert steps(tmp_path) == [1, 3]


def test_what_users_keep_beside_checkpoints_stays(tmp_path: Path) -> None:
    last = "20260101Z000009-step-000009"
    write_checkpoint(tmp_path / last, 9, 1.0)
    own = [f"{last[:-1]}{end}" for end in ("1-keep", "1 (copy)", "1.old")] + ["2026-step-best"]
    for name in own:
        write_checkpoint(tmp_path / name, 1, 2.0)
    (tmp_path / f"{last}.tar.gz").touch()
    (tmp_path / ".notes").mkdir()
    (tmp_path / f".{last}-discarded").mkdir()
    (tmp_path / f".{last[:-1]}1").mkdir()
    assert not unusable_checkpoints(tmp_path)
    delete_old(tmp_path, 1)
    clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(last, *own, ".notes", f"{last}.tar.gz", "best", "latest")
    }


@pytest.mark.parametrize(("keep", "left"), [(-1, [1, 2, 3, 4]), (3, [1, 2, 3, 4]), (1, [1, 4])])
def test_old_checkpoints_are_deleted_after_a_save(keep: int, left: list[int], folder: Path) -> None:
    delete_old(folder, keep)
    assert steps(folder) == left


@pytest.mark.parametrize(
    ("keep", "left"), [(-1, [1, 2, 3, 4]), (3, [1, 3, 4]), (2, [1, 4]), (1, [1, 4])]
)
def test_room_is_made_for_a_checkpoint_that_would_not_fit(
    keep: int, left: list[int], folder: Path, space: int
) -> None:
    make_room(folder, keep, space)
    assert steps(folder) == left
    if keep > 0:
        assert len(left) + 1 <= most_needed(keep)  # type: ignore[operator]


def test_nothing_is_deleted_for_a_checkpoint_that_fits(folder: Path) -> None:
    make_room(folder, 1, needed_bytes=1)
    assert steps(folder) == list(LOSSES)


def test_the_newest_valid_checkpoint_is_never_deleted_to_make_room(
    folder: Path, space: int
) -> None:
    flip_byte(list_checkpoints(folder)[-1].folder / "model.safetensors")
    make_room(folder, 1, space)
    assert steps(folder) == [1, 3, 4]


def test_of_few_checkpoints_an_old_one_is_deleted(tmp_path: Path, disk: Disk) -> None:
    """Two are there, three would be kept, and the disk has room for two."""
    write_checkpoint(tmp_path / "20260101Z000000-step-000000", 0, 3.0)
    write_checkpoint(tmp_path / "20260101Z000001-step-000020", 20, 2.0)
    size = folder_bytes(tmp_path) // 2
    disk(tmp_path, 2.5 * size)
    make_room(tmp_path, 3, needed_bytes=size)
    assert steps(tmp_path) == [20]


def test_nothing_that_is_kept_is_deleted_in_vain(tmp_path: Path, disk: Disk) -> None:
    for step, loss in ((0, 3.0), (1, 2.5), (20, 2.0)):
        write_checkpoint(tmp_path / f"20260101Z00000{min(step, 9)}-step-{step:06d}", step, loss)
    size = folder_bytes(tmp_path) // 3
    disk(tmp_path, 3.5 * size)
    make_room(tmp_path, 4, needed_bytes=3 * size)
    assert steps(tmp_path) == [0, 1, 20]
    make_room(tmp_path, 4, needed_bytes=2 * size)
    assert steps(tmp_path) == [20]


def test_room_is_not_made_from_the_best_on_earlier_validation_data(tmp_path: Path) -> None:
    for step, (loss, file) in enumerate([(0.1, "a"), (0.2, "a"), (3.0, "b"), (2.0, "b")], 1):
        folder = tmp_path / f"20260101Z00000{step}-step-00000{step}"
        write_checkpoint(folder, step, loss, validated_on=file)
    make_room(tmp_path, 1, needed_bytes=2**80)
    assert steps(tmp_path) == [1, 4]
