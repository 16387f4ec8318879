"""The optimizer state on disk: at any path, and what is missing in it."""

import itertools
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from rungs.checkpointing import optimizer_state
from rungs.commands.start_command import hold_run
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.parallel.launchers import Cluster
from rungs.run.folder import RunFolder
from tests.support.written_checkpoints import MODEL, TRAIN

ARRAYS = {"layers.mu": jnp.arange(12.0).reshape(3, 4), "step": jnp.asarray(7)}


@pytest.mark.parametrize(
    "name",
    ["lr[1e-3]", "a**b", "?", "*", "a\\b", "a{b}c", "a b", "100%20", "a\udcffb", "a\nb", "é:;'\"#"],
)
def test_any_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "xlr1").mkdir()
    folder = tmp_path / name / "checkpoint"
    folder.mkdir(parents=True)
    optimizer_state.save_async(folder, ARRAYS).result()
    assert optimizer_state.damage(folder) is None
    loaded = optimizer_state.load_to_host(folder)
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "xlr1"])


def test_a_clock_that_jumps_ends_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a laptop wakes up. Orbax measures its time limit by the clock."""
    now, jumps = time.time, itertools.count(step=3_600)
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    optimizer_state.save_async(tmp_path, ARRAYS).result()
    assert next(jumps) > 4 * 3_600
    assert optimizer_state.damage(tmp_path) is None


def test_a_neighbour_whose_name_matches_is_not_read(tmp_path: Path) -> None:
    """Orbax reads the parts of `run?` by a pattern, which `run1` matches, too."""
    for name, value in (("run1", 1.0), ("run?", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        optimizer_state.save_async(folder, {name: jnp.full(3, value)}).result()
    assert optimizer_state.load_to_host(tmp_path / "run?").keys() == {"run?"}


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "_METADATA"])
def test_a_state_that_cannot_be_opened(lost: str, tmp_path: Path) -> None:
    optimizer_state.save_async(tmp_path, ARRAYS).result()
    (tmp_path / "optimizer" / "state" / lost).unlink()
    assert optimizer_state.damage(tmp_path) is not None


@pytest.mark.parametrize("key", ["layers.mu/c/0/0", "step/c", "step/zarr.json"])
def test_a_chunk_that_is_missing(key: str, tmp_path: Path) -> None:
    optimizer_state.save_async(tmp_path, ARRAYS).result()
    file: dict[str, str] = {"driver": "file", "path": f"{tmp_path}/optimizer/state/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": file}).result()
    store.delete_range(tensorstore.KvStore.KeyRange(key, key + "\0")).result()
    assert key in str(optimizer_state.damage(tmp_path))


def test_several_processes_need_a_path_that_orbax_reads_as_it_is(tmp_path: Path) -> None:
    config = RunConfig(MODEL, TRAIN)
    with pytest.raises(UserError, match=r"with several processes, the path of a run can't have \*"):
        hold_run(RunFolder(tmp_path / "lr[1e-3]"), config, Cluster()).__enter__()
