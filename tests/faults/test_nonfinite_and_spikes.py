"""Losses, gradients and weights that are not finite; loss spikes.

The datasets here have a rare token in the steps that a test chooses, so that a fault affects only
these steps: the token's embedding overflows when it is squared, or its loss is made wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.load import Start
from rungs.checkpointing.weights_file import Weights
from rungs.checks.resume import read_arrays
from rungs.common.errors import EXIT_FAILED, RunFailure, UserError
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.objectives import next_token as objective
from rungs.parallel import devices
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.state import named_arrays
from rungs.training import dataset_learner, replay
from rungs.training.failed_steps import MAX_FAILED_STEPS, open_failed_step
from tests.faults.short_runs import train_here
from tests.support.sharded_models import RECIPE
from tests.support.starting import overflow
from tests.support.tiny_run import MODEL, assert_same_outcome, make_dataset, make_run

pytestmark = pytest.mark.long

RARE = 63
STEP_TOKENS, MICROBATCH_TOKENS = 128, 64


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[RunFolder, Path]]:
    """Make a run and datasets with the rare token in these microbatches: (step, microbatch)."""

    def make(places: list[tuple[int, int]], **train: Any) -> tuple[RunFolder, Path]:
        datasets = tmp_path / "datasets"
        make_dataset(datasets)
        for split in ("train", "validation"):
            path = datasets / "tiny" / f"{split}.safetensors"
            tokens = load_file(path)["tokens"] % RARE
            for at, number in places if split == "train" else ():
                tokens[at * STEP_TOKENS + number * MICROBATCH_TOKENS + 5] = RARE
            save_file({"tokens": tokens}, path)
        run = make_run(tmp_path / "run", **{"keep_checkpoints": -1} | train)
        return run, datasets

    return make


def change_losses(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[jax.Array, jax.Array], jax.Array]
) -> None:
    """Change the loss of each target in training and replay.

    Args:
        change: from losses_BS, and where the target is the rare token, to new losses_BS.
    """

    def changed(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
        return change(target_losses(logits_BSV, targets_BS), targets_BS == RARE)

    def summed(
        model: GPT, tokens_BS: jax.Array, targets_BS: jax.Array, *how: Any
    ) -> tuple[jax.Array, None]:
        return changed(model(tokens_BS, *how[:2]), targets_BS).sum(), None

    monkeypatch.setattr(GPT, "summed_loss", summed)
    for module in (replay, objective):
        monkeypatch.setattr(module, "target_losses", changed)


def weights_of(run: RunFolder) -> dict[int, dict[str, np.ndarray]]:
    """Return the weights of each checkpoint; all must be valid and finite."""
    found = {}
    for checkpoint in list_checkpoints(run.checkpoints):
        assert checkpoint.damage() == []
        weights = Weights(checkpoint.folder / "model.safetensors")
        found[checkpoint.step] = {name: weights.array(name) for name in weights.names()}
        assert all(np.isfinite(array).all() for array in found[checkpoint.step].values())
    return found


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == array.tobytes() for name, array in other.items())


def test_a_microbatch_with_a_nonfinite_loss_is_skipped_and_its_replay_names_the_tensor(
    make: Any, monkeypatch: pytest.MonkeyPatch, messages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, datasets = make([(7, 1), (12, 0)])
    overflow(RARE, monkeypatch)
    assert train_here(run, datasets) == 0
    monkeypatch.undo()
    steps = metrics.read(run.metrics)
    assert [s.global_step for s in steps if s.dropped_microbatches] == [7, 12]
    assert all(s.train_loss is not None and s.gradient_norm is not None for s in steps)
    assert (
        "step 7: 1 of 2 microbatches dropped: the loss of microbatch 1 is not finite; to replay"
        f" it: uv run train.py {run.path} --replay step-000007"
    ) in messages.text
    assert list(weights_of(run)) == [0, 5, 10, 15, 20, 23]
    assert sorted(path.name for path in run.failed_steps.iterdir()) == [
        "step-000007",
        "step-000012",
    ]

    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert replay.replay(run, "step-000007", dataset_learner.on_datasets(datasets)) == EXIT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "microbatch 1, which was dropped because of the loss"
    assert lines[-1] == "blocks.0.attention_norm is the first tensor that is not finite"
    # sequence 0 and token 5 of it
    assert "32 of 2,048 not finite, the first at [0, 5, 0]" in lines[-2]
    assert all("not finite" not in line for line in lines[:-2])
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    with pytest.raises(UserError, match=r"--replay step-000008: no such failed step"):
        replay.replay(run, "step-000008", dataset_learner.on_datasets(datasets))
    batch = run.failed_steps / "step-000007" / "batch.safetensors"
    content = batch.read_bytes()
    batch.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"batch.safetensors: damaged"):
        replay.replay(run, "step-000007", dataset_learner.on_datasets(datasets))


def test_too_many_nonfinite_steps_stop_the_run(
    make: Any, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    bad = [(number, part) for number in range(8, 24) for part in (0, 1)]
    run, datasets = make([(3, 0), (3, 1), *bad], max_non_finite_steps=4)
    overflow(RARE, monkeypatch)
    with pytest.raises(RunFailure, match="step 11: no finite loss and gradient in 4 steps in"):
        train_here(run, datasets)
    assert "step 11: no finite loss and gradient in 4 steps in a row" in run.log.read_text()
    weights = weights_of(run)
    assert list(weights) == [0, 5, 10]
    assert [s.global_step for s in metrics.read(run.metrics)] == list(range(12))
    messages.clear()
    with pytest.raises(RunFailure, match="step 11: no finite loss and gradient in 4 steps in"):
        train_here(run, datasets)
    assert "4 steps before" not in messages.text
    assert_equal(weights_of(run)[10], weights[10])
    config_file = run.path / "train.json"
    keys = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(keys | {"max_non_finite_steps": "never"}))
    assert train_here(run, datasets) == 0
    assert len(list(run.failed_steps.glob("step-*"))) == MAX_FAILED_STEPS


def test_the_replay_names_the_first_nonfinite_gradient_of_the_backward_pass(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    messages: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, datasets = make([(7, 0)], drop_rate=0.2)
    (run.path / "model.json").write_text(json.dumps(MODEL | RECIPE))
    # zero, of which the root has an infinite derivative
    change_losses(monkeypatch, lambda loss, rare: loss + jnp.sqrt(jnp.where(rare, 0 * loss, 1)) - 1)
    assert train_here(run, datasets) == 0
    assert "step 7: 1 of 2 microbatches dropped: the gradient of blocks." in messages.text
    weights_of(run)
    capsys.readouterr()
    assert replay.replay(run, "step-000007", dataset_learner.on_datasets(datasets)) == EXIT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "gradient of the logits is the first tensor that is not finite"
    assert [line.split()[0] for line in lines[-5:-2]] == ["final_norm", "head", "the"]


def test_nonfinite_weights_are_never_saved(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if a bit of memory had flipped: the next step has no finite loss."""
    run, datasets = make([])
    make_step = dataset_learner.make_step
    taken = 0

    def made(*args: Any) -> Any:
        train_step = make_step(*args)

        def step_then_flip_a_bit(model: GPT, *rest: Any) -> Any:
            nonlocal taken
            result = train_step(model, *rest)
            taken += 1
            if taken == 8:
                with jax.transfer_guard("allow"):
                    scale = model.final_norm.scale  # type: ignore[union-attr]
                    assert scale is not None
                    scale[...] = scale[...].at[3].set(jnp.nan)
            return result

        return step_then_flip_a_bit

    monkeypatch.setattr(dataset_learner, "make_step", made)
    with pytest.raises(RunFailure, match=r"step 8: final_norm.scale not finite; training stopped"):
        train_here(run, datasets)
    assert list(weights_of(run)) == [0, 5]
    assert replay.replay(run, "step-000008", dataset_learner.on_datasets(datasets)) == 0
    output = capsys.readouterr().out
    assert "all tensors are finite this time: suspect the hardware" in output
    assert train_here(run, datasets) == 0
    assert [s.global_step for s in metrics.read(run.metrics)] == list(range(24))
    assert all(s.train_loss is not None for s in metrics.read(run.metrics))


def test_overflowing_moments_are_never_saved_and_the_replay_names_step_and_moment(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gradient of 1e25 is finite, but its square is not."""
    at, saved = 7, 10
    run, datasets = make([(at, 0)], clipping_max_norm=None)
    change_losses(monkeypatch, lambda loss, rare: jnp.where(rare, 1e25, 1) * loss)
    monkeypatch.setattr(
        "rungs.optim.skipping_optimizer.optax.tree_utils.tree_norm", norm_of_large_numbers
    )
    with pytest.raises(RunFailure, match=rf"step {saved}: opt_state.1.nu\."):
        train_here(run, datasets)
    assert list(weights_of(run)) == list(range(0, saved, 5))
    assert (
        replay.replay(run, f"step-{saved:06d}", dataset_learner.on_datasets(datasets))
        == EXIT_FAILED
    )
    assert f"after step {at}: opt_state.1.nu." in capsys.readouterr().out


def norm_of_large_numbers(tree: Any) -> jax.Array:
    """Return the norm of a tree even if the squares of its elements are not finite."""
    leaves = [leaf.ravel() / 1e25 for leaf in jax.tree.leaves(tree)]
    return 1e25 * jnp.linalg.norm(jnp.concatenate(leaves))


def test_a_spike_is_recorded_and_on_request_its_step_changes_nothing_but_the_schedule(
    make: Any, monkeypatch: pytest.MonkeyPatch, messages: Any, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"min_train_tokens": 41 * STEP_TOKENS, "checkpoint_interval": 13}
    keys |= {"skip_spikes": True, "keep_checkpoints": -1}
    run, datasets = make([(40, 0), (40, 1)], **keys)
    change_losses(monkeypatch, lambda loss, rare: jnp.where(rare.any(), 100, 1) * loss)
    assert train_here(run, datasets) == 0
    steps = metrics.read(run.metrics)
    spikes = {s.global_step: s.spike for s in steps if s.spike}
    assert spikes == {40: "skipped"}
    assert steps[40].train_loss is not None
    assert steps[39].train_loss is not None
    # only the devices that have the token multiply their part of the loss
    assert steps[40].train_loss > 10 * steps[39].train_loss
    assert "step 40: loss spike, " in messages.text
    kept = list_checkpoints(run.checkpoints)[-2:]
    assert [checkpoint.step for checkpoint in kept] == [39, 40]
    (weights, before), (same_weights, after) = map(read_arrays, kept)
    assert after.pop("step") == before.pop("step") + 1
    assert_equal(same_weights | after, weights | before)
    # a run resumed from step 39 has the same limits
    uninterrupted = make_run(tmp_path / "uninterrupted", **keys)
    assert train_here(uninterrupted, datasets) == 0
    assert train_here(run, datasets, rewind_to="step-000039") == 0
    assert_same_outcome(run, uninterrupted)


def test_an_overflowing_norm_is_not_a_spike_and_its_replay_names_it(
    make: Any, monkeypatch: pytest.MonkeyPatch, messages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients of 1e25 are finite, so every module of the replay has finite ones. The replay also
    skips the spike that the run skipped."""
    longer = {"min_train_tokens": 43 * STEP_TOKENS, "checkpoint_interval": 40}
    run, datasets = make([(41, 0), (41, 1), (42, 0), (42, 1)], skip_spikes=True, **longer)
    (run.path / "model.json").write_text(json.dumps(MODEL | {"n_layers": 0}))
    path = datasets / "tiny" / "train.safetensors"
    tokens = load_file(path)["tokens"]
    tokens[42 * STEP_TOKENS + 7 :: MICROBATCH_TOKENS] = RARE
    save_file({"tokens": tokens}, path)
    factors = jnp.asarray([1, 100, 1e25])
    change_losses(monkeypatch, lambda loss, rare: factors[rare.sum()] * loss)
    assert train_here(run, datasets) == 0
    assert "step 42: 2 of 2 microbatches dropped: the gradient norm is not" in (messages.text)
    spike, last = metrics.read(run.metrics)[-2:]
    assert (spike.spike, spike.dropped_microbatches, spike.clipped) == ("skipped", 0, False)
    assert (last.train_loss, last.spike, last.dropped_microbatches) == (None, None, 2)
    capsys.readouterr()
    assert replay.replay(run, "step-000042", dataset_learner.on_datasets(datasets)) == EXIT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("/step-000042/checkpoint: 1 step retrained")
    assert lines[-2:] == [
        "all microbatches, compiled as in training",
        "the gradient norm is the first tensor that is not finite",
    ]
    failed = open_failed_step(run, "step-000042")
    mesh = devices.create_run_mesh(failed.config.train, failed.config.model, failed.meta.sharding)
    start = Start(run, failed.config, StartOptions(), failed.checkpoint, None)
    model, _ = replay._retrain(failed, start, mesh, dataset_learner.on_datasets(datasets))
    arrays = {name: np.asarray(array) for name, array in named_arrays(model).items()}
    assert_equal(arrays, weights_of(run)[40])


def test_a_failed_step_that_cannot_be_kept_does_not_end_the_run(
    make: Any, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    run, datasets = make([(7, 1)])
    overflow(RARE, monkeypatch)

    def batch(*_: Any) -> None:
        raise RunFailure("the tokens have gone")

    monkeypatch.setattr("rungs.data.tokens.loader.TrainingData.batch", batch)
    assert train_here(run, datasets) == 0
    assert "microbatch 1 is not finite; not saved for replay: the tokens have gone" in messages.text
    assert not run.failed_steps.exists()


def test_a_step_before_the_first_checkpoint_is_replayed_from_the_start(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, datasets = make([(0, 1)])
    overflow(RARE, monkeypatch)
    assert train_here(run, datasets) == 0
    capsys.readouterr()
    assert replay.replay(run, "step-000000", dataset_learner.on_datasets(datasets)) == EXIT_FAILED
    output = capsys.readouterr().out
    assert "step 0, from the start: 0 steps retrained" in output
    assert "blocks.0.attention_norm is the first tensor that is not finite" in output
