"""A run's checkpoints: saved, linked, deleted, restored, loaded, at any path; damage is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.checkpointing import manifest, optimizer_state
from rungs.checkpointing.checkpoint_folder import (
    best_of,
    clean_up,
    find_weights,
    list_checkpoints,
)
from rungs.checkpointing.load import load_model, restore
from rungs.checkpointing.manifest import CheckpointMeta, read_checkpoint
from rungs.checkpointing.saver import Saver
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import RunFailure, UserError
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import one_device
from rungs.parallel.target_device import Target, trace_for
from rungs.step.state import create_model_and_optimizer, host_copies, named_arrays
from tests.support.configs import mesh_of, model_config, train_config

CONFIG = RunConfig(model_config(), train_config(keep_checkpoints=2))
SHARDED = CONFIG._replace(train=train_config(keep_checkpoints=2, max_weights_file_bytes=3_000))


def meta(step: int, loss: float | None = None) -> CheckpointMeta:
    return CheckpointMeta(
        global_step=step,
        total_steps=100,
        tokens_seen=step,
        train_loss=1.0,
        validation_loss=None,
        selection_loss=loss,
        model=CONFIG.model.as_json(),
        train=CONFIG.train.as_json(),
        datasets={},
        tokenizer="gpt2",
        sharding=ShardingConfig(data=1, tensor=1),
        created="2026-01-01T00:00:00+00:00",
        versions={},
        checksums={},
    )


@pytest.fixture(scope="module")
def state() -> tuple[GPT, SkippingOptimizer]:
    return create_model_and_optimizer(CONFIG, 100, one_device())


def save(
    folder: Path,
    state: tuple[GPT, SkippingOptimizer],
    *metas: CheckpointMeta,
    config: RunConfig = CONFIG,
) -> Path:
    with Saver(folder, config, None, lambda: None, ()) as saver:
        for one in metas:
            saver.save(*state, one)
    return folder


@pytest.fixture(scope="module", params=[CONFIG, SHARDED], ids=["one file", "shards"])
def config(request: pytest.FixtureRequest) -> RunConfig:
    found: RunConfig = request.param
    return found


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
    state: tuple[GPT, SkippingOptimizer],
    config: RunConfig,
) -> Path:
    """The checkpoints that are left of six: that of step 0, the newest two and the best."""
    losses = [4.0, 1.0, 3.0, 2.0, 2.0]
    metas = [meta(step, loss) for step, loss in enumerate(losses)]
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    return save(folder, state, *metas, meta(5), config=config)


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A copy of `saved` that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True))


def test_the_newest_and_the_best_checkpoint_are_kept(folder: Path) -> None:
    assert [c.step for c in list_checkpoints(folder)] == [0, 1, 4, 5]
    assert read_checkpoint(folder / "best").step == 1
    assert read_checkpoint(folder / "latest").step == 5


def test_a_checkpoint_says_whether_it_was_the_best_when_it_was_saved(folder: Path) -> None:
    found = {c.step: c.meta.is_best for c in list_checkpoints(folder)}
    assert found == {0: True, 1: True, 4: False, 5: False}


def test_the_checksum_of_an_older_checkpoint_is_of_the_keys_that_it_has() -> None:
    added = {"is_best", "learning_rate", "min_train_loss", "max_train_loss", "avg_train_loss"}
    assert not added & meta(0).as_json().keys()
    update = dict.fromkeys(added, 1.0) | {"is_best": True}
    assert added <= meta(0).model_copy(update=update).as_json().keys()


def test_weights_above_the_limit_are_sharded(folder: Path, config: RunConfig) -> None:
    (best,) = [c.folder for c in list_checkpoints(folder) if c.step == 1]
    files = {path.name for path in best.glob("model*")}
    checksums = list_checkpoints(folder)[0].meta.checksums
    assert files == {name for name in checksums if name.startswith("model")}
    if config == CONFIG:
        assert files == {"model.safetensors"}
    else:
        assert "model.safetensors.index.json" in files
        assert len(files) > 3
        assert "model.safetensors" not in files


def test_links_are_relative_so_the_folder_can_be_moved(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path / "moved")
    assert read_checkpoint(moved / "best").step == 1


def test_restored_state_is_bit_equal(folder: Path, state: tuple[GPT, SkippingOptimizer]) -> None:
    saved = list_checkpoints(folder)[-1]
    restored = restore(saved, CONFIG, 100, mesh_of(2))
    for found, expected in (
        (named_arrays(restored[0]), named_arrays(state[0])),
        (named_arrays(restored[1]), named_arrays(state[1])),
    ):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert len(found[name].sharding.device_set) == 2
            assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes(), name


def test_whole_moments_of_dp_are_restored_into_shards_and_back(tmp_path: Path) -> None:
    mesh, target = mesh_of(2), Target("gpu")
    whole = create_model_and_optimizer(CONFIG, 100, mesh)
    moments = nnx.state(whole[1])
    nnx.update(whole[1], jax.tree.map(lambda a: a + jnp.arange(a.size).reshape(a.shape), moments))
    saved = read_checkpoint(save(tmp_path / "whole", whole, meta(1)) / "latest")
    with trace_for(target):
        sharded = restore(saved, CONFIG, 100, mesh)
    assert any(not array.is_fully_replicated for array in named_arrays(sharded[1]).values())
    assert all(array.is_fully_replicated for array in named_arrays(sharded[0]).values())
    saved = read_checkpoint(save(tmp_path / "sharded", sharded, meta(2)) / "latest")
    again = restore(saved, CONFIG, 100, mesh)
    expected = named_arrays(whole[0]) | named_arrays(whole[1])
    for model, optimizer in (sharded, again):
        found = named_arrays(model) | named_arrays(optimizer)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("path", ["best/model.safetensors", "."])
def test_a_model_is_loaded_from_its_weights_alone(
    path: str, folder: Path, state: tuple[GPT, SkippingOptimizer]
) -> None:
    run = folder if path != "." else folder.parent
    tokens_BS = jax.numpy.arange(8)[None]
    assert np.array_equal(load_model(run / path)(tokens_BS), state[0](tokens_BS))


def test_equal_weights_and_configs_give_equal_files(
    tmp_path: Path, state: tuple[GPT, SkippingOptimizer], config: RunConfig
) -> None:
    def checksums(name: str) -> dict[str, str]:
        save(tmp_path / name, state, meta(1), config=config)
        saved = read_checkpoint(tmp_path / name / "latest").meta.checksums
        return {file: sha256 for file, sha256 in saved.items() if "optimizer/" not in file}

    assert checksums("one") == checksums("other")


def test_unfinished_checkpoints_of_a_crash_are_deleted(folder: Path) -> None:
    (folder / ".20260101Z000000-step-000009").mkdir()
    (folder / ".20260101Z000000-step-000009" / "model.safetensors").write_bytes(b"half")
    (folder / "best").unlink()
    clean_up(folder)
    assert not list(folder.glob(".*"))
    assert read_checkpoint(folder / "best").step == 1


def test_the_best_has_the_lowest_loss_and_is_the_first_of_equals() -> None:
    def at(step: int, loss: float | None) -> manifest.Checkpoint:
        return manifest.Checkpoint(Path(f"step-{step}"), meta(step, loss))

    assert best_of([at(0, None), at(1, 2.0), at(2, 3.0)]) == at(1, 2.0)
    assert best_of([at(0, 2.0), at(1, 2.0)]) == at(0, 2.0)
    assert best_of([at(1, None)]) is None


def measured(step: int, loss: float | None, **changes: Any) -> CheckpointMeta:
    """Return the meta of a checkpoint with a validation split, and with some of `train` changed."""
    sha256 = changes.pop("sha256", "a" * 64)
    train = CONFIG.train.as_json() | changes
    return meta(step, loss).model_copy(
        update={"train": train, "datasets": {"d": {"train": "b" * 64, "validation": sha256}}}
    )


@pytest.mark.parametrize(
    "changes", [{"validation_tokens": 32}, {"start_val_token": 7}, {"sha256": "c" * 64}]
)
def test_the_best_is_chosen_among_losses_on_the_same_validation_data(
    changes: dict[str, Any],
) -> None:
    def at(step: int, loss: float | None, **changes: Any) -> manifest.Checkpoint:
        return manifest.Checkpoint(Path(f"step-{step}"), measured(step, loss, **changes))

    easy = [at(0, 0.5, **changes), at(1, 0.4, **changes), at(2, 0.6, **changes)]
    assert best_of(easy) == easy[1]
    assert best_of([*easy, at(3, None)]) == easy[1]
    assert best_of([*easy, at(3, 2.0), at(4, 1.5), at(5, 1.7)]) == at(4, 1.5)
    trained = manifest.Checkpoint(Path("step-6"), meta(6, 9.0))
    assert best_of([*easy, trained]) == trained


def test_the_best_on_earlier_validation_data_is_kept(
    tmp_path: Path, state: tuple[GPT, SkippingOptimizer]
) -> None:
    easy = [measured(0, 0.5, validation_tokens=32), measured(1, 0.4, validation_tokens=32)]
    folder = save(tmp_path / "c", state, *easy, *(measured(n, 3.0 - n / 10) for n in range(2, 6)))
    assert [c.step for c in list_checkpoints(folder)] == [0, 1, 4, 5]
    assert read_checkpoint(folder / "best").step == 5


def test_a_failed_write_is_raised_and_leaves_no_checkpoint(
    tmp_path: Path, state: tuple[GPT, SkippingOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(manifest, "write_manifest", fail)
    folder = tmp_path / "checkpoints"
    with pytest.raises(
        RunFailure, match="checkpoint of step 0 could not be written: OSError: disk"
    ):
        save(folder, state, meta(0))
    assert list_checkpoints(folder) == []


@pytest.mark.parametrize("content", [b"", b"\x08" + b"\0" * 7 + b"not json", b"\xff" * 16])
def test_a_file_that_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not readable as safetensors"):
        load_model(path)


def test_host_copies_do_not_change_and_have_no_padding() -> None:
    train = train_config(sharding=ShardingConfig(mode="fsdp_tp", data=2))
    config = RunConfig(model_config(vocab_size=33), train)
    model, optimizer = create_model_and_optimizer(config, 10, mesh_of(2, 2))
    assert model.token_embedding.embedding[...].shape[0] == 34
    copies = host_copies(model, 33) | host_copies(optimizer, 33)
    arrays = named_arrays(model, 33) | named_arrays(optimizer, 33)
    wanted = {name: np.array(array) for name, array in arrays.items()}
    gradient = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    update = nnx.jit(
        lambda model, optimizer: optimizer.update(model, gradient, jnp.asarray(1.0)),
        donate_argnums=(0, 1),
    )
    update(model, optimizer)
    assert {name: copy.shape for name, copy in copies.items()} == {
        name: array.shape for name, array in wanted.items()
    }
    assert all((copies[name] == array).all() for name, array in wanted.items())
    assert all(copy.flags.c_contiguous for copy in copies.values())


def test_tensors_that_do_not_match_are_named(folder: Path) -> None:
    weights = Weights(find_weights(folder.parent))
    shapes = {name: weights.array(name).shape for name in weights.names()}
    del shapes["head.kernel"]
    shapes |= {"final_norm.scale": (3,), "final_norm.gain": (16,)}
    with pytest.raises(UserError) as raised:
        weights.check_tensors(shapes)
    assert [line.split(": ", 1)[1] for line in str(raised.value).splitlines()] == [
        "tensor final_norm.gain: missing",
        "tensor final_norm.scale: has shape (16,), must have (3,)",
        "tensor head.kernel: unknown",
    ]


def test_a_checkpoint_is_found_without_the_time_in_its_name(folder: Path) -> None:
    checkpoint = list_checkpoints(folder)[1].folder
    step = checkpoint.name.partition("-")[2]
    assert find_weights(folder / step).parent == checkpoint
    again = shutil.copytree(checkpoint, folder / f"99990101Z000000-{step}")
    shutil.copytree(checkpoint, folder / f"good-{step}")
    assert find_weights(folder / step).parent == again
    own = shutil.copytree(checkpoint, folder / step)
    assert find_weights(folder / step).parent == own


def test_the_header_describes_the_model(folder: Path, config: RunConfig) -> None:
    weights = Weights(find_weights(folder.parent))
    assert weights.header[:3] == (*config, "gpt2")


def test_meta_of_another_version_is_refused_by_name() -> None:
    other = meta(1).model_copy(update={"model": json.loads('{"vocab_size": 3, "n_kv_heads": 1}')})
    with pytest.raises(UserError, match="another version of Rungs"):
        other.run_config()


def test_loading_from_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run, checkpoint"):
        find_weights(tmp_path / "nothing")
    with pytest.raises(UserError, match="no checkpoint there yet; train it first"):
        find_weights(tmp_path)


ARRAYS = {"layers.mu": jnp.arange(12.0).reshape(3, 4), "step": jnp.asarray(7)}


@pytest.mark.parametrize("name", ["a{b}c", "a b", "100%20", "é:;'\"#"])
def test_any_path(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / "checkpoint"
    folder.mkdir(parents=True)
    optimizer_state.save_async(folder, ARRAYS).result()
    loaded = optimizer_state.load_to_host(folder)
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["lr[1e-3]", "?", "*", "a\\b"])
def test_a_path_that_orbax_would_read_as_another_one(name: str, tmp_path: Path) -> None:
    for use in (optimizer_state.save_async, optimizer_state.load):
        with pytest.raises(UserError, match=r"can't have \*"):
            use(tmp_path / name, ARRAYS)  # type: ignore[arg-type]
