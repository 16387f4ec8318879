"""The weights under LoRA are saved once per run: every reader finds them, or says what is gone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rungs.checkpointing.checkpoint_folder import list_checkpoints, list_run, update_links
from rungs.checkpointing.load import MergedWeights, load_model, load_token_generator
from rungs.checkpointing.manifest import Checkpoint, read_checkpoint, write_manifest
from rungs.checkpointing.weights_file import Weights, write_weights
from rungs.cli import checkpointing
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.integrations.mirror_folder import MirrorFolder
from rungs.integrations.mirroring import Copier, restore_if_empty
from rungs.model.lora import LOW_RANK_NAMES
from rungs.run.derive import BranchPoint, create_like
from rungs.run.folder import RunFolder
from rungs.training.resume import find_branch_point
from tests.cli.test_plan import planned
from tests.support.configs import ONE_FILE
from tests.support.starting import files, go, refusal
from tests.support.tiny_run import (
    assert_same_outcome,
    change,
    last_checkpoint,
    make_dataset,
    make_run,
)
from tests.training.test_fine_tuning import LORA, ORIGIN, write_start

KEYS: dict[str, Any] = {
    **{"lora": LORA, "ema_decay": 0.5, "drop_rate": 0.0, "min_train_tokens": 4 * 128},
    **{"checkpoint_interval": 1, "keep_checkpoints": -1, "sharding": {"devices": 1}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets, the run `first` on an imported model in bfloat16, and `second` on
    what `first` made of it."""
    place = tmp_path_factory.mktemp("place")
    make_dataset(place)
    first = make_run(place / "first", start_from="imported", **KEYS)
    write_start(first.imported, "gpt2", ORIGIN, "bfloat16", seed=11)
    assert go(first, place) == 0
    second = make_run(place / "second", start_from=str(first.path), **KEYS)
    assert go(second, place) == 0
    return place


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    for name in ("first", "second"):
        shutil.copytree(trained / name, tmp_path / name, symlinks=True)
    shutil.copytree(trained / "tiny", tmp_path / "tiny")
    return tmp_path


def base_of(run: RunFolder) -> Path:
    base = last_checkpoint(run).weights.base
    assert base is not None
    return base.path.parent


def own_names(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        return set(opened.keys())


def write_whole(checkpoint: Checkpoint) -> None:
    """Rewrite a checkpoint as it was before adapters had a file of their own."""
    for folder in (checkpoint.folder / "ema", checkpoint.folder):
        weights = Weights(folder / "model.safetensors")
        arrays = {name: np.array(weights.array(name)) for name in weights.names()}
        header = weights.header._replace(base=None)
        (folder / "model.safetensors").unlink()
        write_weights(folder, arrays, header, ONE_FILE)
    (checkpoint.folder / "meta.json").unlink()
    write_manifest(checkpoint.folder, checkpoint.meta)


def test_checkpoints_hold_the_adapter_and_the_base_is_there_once(trained: Path) -> None:
    first, second = RunFolder(trained / "first"), RunFolder(trained / "second")
    for run in (first, second):
        for checkpoint in list_checkpoints(run.checkpoints):
            for file in checkpoint.folder.rglob("*.safetensors"):
                assert all(name.endswith(LOW_RANK_NAMES) for name in own_names(file))
                assert Weights(file).base is not None
    assert base_of(first) == first.imported
    assert not list(first.checkpoints.glob("base-*"))
    (base,) = second.checkpoints.glob("base-*")
    assert base_of(second) == base
    best = MergedWeights(first.checkpoints / "best" / "model.safetensors")
    found = Weights(base / "model.safetensors")
    assert found.names() == best.names()
    for name in found.names():
        assert found.array(name).dtype == best.array(name).dtype
        assert found.array(name).tobytes() == best.array(name).tobytes()
    assert base.name == f"base-{best.sha256()[:16]}"
    assert base.name in [one.name for one in list_run(second, verify=True)]


def test_old_checkpoints_with_all_weights_load_and_are_continued(place: Path) -> None:
    run, resumed = RunFolder(place / "first"), RunFolder(place / "resumed")
    shutil.copytree(run.path, resumed.path, symlinks=True)
    for late in list_checkpoints(resumed.checkpoints)[2:]:
        shutil.rmtree(late.folder)
    for early in list_checkpoints(resumed.checkpoints):
        expected, averaged = early.weights.sha256(), early.averaged_weights
        assert averaged is not None
        write_whole(early)
        again = read_checkpoint(early.folder)
        assert again.weights.base is None
        assert again.weights.sha256() == expected
    update_links(resumed.checkpoints)
    shutil.rmtree(resumed.imported)  # as could be done when checkpoints had everything
    assert go(resumed, place) == 0
    assert_same_outcome(resumed, run)
    assert base_of(resumed).name.startswith("base-")
    assert last_checkpoint(resumed).weights.sha256() == last_checkpoint(run).weights.sha256()
    assert (
        CliRunner().invoke(checkpointing.main, [str(resumed.path), "--average", "3"]).exit_code == 0
    )


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_base_that_is_gone_or_another_is_one_line(name: str, is_gone: bool, place: Path) -> None:
    run = RunFolder(place / name)
    change(run, min_train_tokens=5 * 128)
    base = base_of(run)
    shutil.rmtree(base)
    if not is_gone:
        write_start(base, "gpt2", ORIGIN, "bfloat16", seed=12)
    place_named = base.name if is_gone else f"{base}/model.safetensors"
    best = run.checkpoints / "best"
    for attempt in (
        lambda: load_model(run.path),
        lambda: load_token_generator(best / "ema"),
        lambda: find_branch_point(run, 1),
    ):
        with pytest.raises(UserError) as raised:
            attempt()
        assert "\n" not in str(raised.value)
        assert place_named in str(raised.value)
    assert place_named in refusal(run, place, extend=True)
    assert place_named in refusal(run, place, extend=True, rewind_to="1")
    ended = CliRunner().invoke(checkpointing.main, [str(run.path), "--verify"])
    assert ended.exit_code == 1
    assert ended.output.count(": damaged: ") == 4


def test_what_moved_aside_or_was_copied_finds_its_base(place: Path) -> None:
    run = RunFolder(place / "second")
    expected = last_checkpoint(run).weights.sha256()
    assert go(run, place, rewind_to="1") == 0
    (aside,) = run.aside.iterdir()
    *_, last = list_checkpoints(aside / "checkpoints")
    last.weights.refuse_changed_base()
    assert last.weights.sha256() == expected
    alone = place / "alone"
    shutil.copytree(last.folder, alone)
    with pytest.raises(UserError, match=r"put back base-.* beside its checkpoint"):
        Weights(alone / "model.safetensors")
    shutil.copytree(base_of(run), place / base_of(run).name)
    assert Weights(alone / "model.safetensors").sha256() == expected


def test_a_branch_brings_the_base_along(place: Path) -> None:
    run = RunFolder(place / "second")
    point = BranchPoint(1, lambda: find_branch_point(run, 1))
    with create_like(
        str(place / "branch"), str(run.path), ["keep_checkpoints=2"], True, lambda _: point
    ):
        shutil.rmtree(run.checkpoints)
    branch = RunFolder(place / "branch")
    last_checkpoint(branch).weights.refuse_changed_base()
    assert base_of(branch).parent == branch.checkpoints


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_mirror_has_the_base_once_and_gives_it_back(is_linked: bool, place: Path) -> None:
    run, mirror = RunFolder(place / "second"), place / "mirror"
    if is_linked:  # to a larger disk
        run.checkpoints.rename(place / "disk")
        run.checkpoints.symlink_to(place / "disk")
    expected = last_checkpoint(run).weights.sha256()
    base = base_of(run).name
    Copier(run, MirrorFolder(str(mirror)), -1).copy(everything=True)
    assert len(list(mirror.rglob(f"{base}/model.safetensors"))) == 1
    disk.move(run.checkpoints / base, place / base)
    Copier(run, MirrorFolder(str(mirror)), -1).copy(everything=True)
    shutil.rmtree(run.path)
    restore_if_empty(run, str(mirror), lambda _: None)
    last_checkpoint(run).weights.refuse_changed_base()
    assert last_checkpoint(run).weights.sha256() == expected


def test_a_plan_counts_the_base_once(trained: Path) -> None:
    first, second = (
        planned(RunFolder(trained / name), "mine:1e12:1e9:1e9").disk for name in ("first", "second")
    )
    saved = last_checkpoint(RunFolder(trained / "second")).folder
    on_disk = sum(len(body) for name, body in files(saved).items() if name.endswith(".safetensors"))
    assert first.checkpoint_bytes == second.checkpoint_bytes
    assert first.base_bytes == 0
    (base,) = (trained / "second" / "checkpoints").glob("base-*")
    tensors = Weights(base / "model.safetensors")
    size = sum(tensors.array(name).nbytes for name in tensors.names())
    assert second.base_bytes == size
    assert second.needed_bytes == size + second.checkpoint_bytes * (second.checkpoints or 1)
    assert on_disk < size
