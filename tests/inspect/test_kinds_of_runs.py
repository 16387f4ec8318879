"""The statistics of every kind of run: objectives, dtypes, optimizers, architectures. Weights and
updates are those of the step itself, the gradient has the norm that the step returns, and
activations are those of a second decoder in float64 NumPy."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_any_run
from rungs.inspect.watch import make_measurement
from rungs.inspect.watch_activations import attention_of_heads
from rungs.model.blocks import Compute
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.objectives.table import objective_of
from rungs.parallel.sharding import place_batch
from rungs.parallel.target_device import Target, trace_for
from rungs.step.state import create_model_and_optimizer, shapes_of
from rungs.step.train_step import StepResult, make_step
from tests.inspect import reference_statistics
from tests.support import reference_gpt
from tests.support.configs import mesh_of, model_config
from tests.support.sharded_models import (
    ARCHITECTURES,
    LENGTH,
    RECIPE_OF_MUON,
    SEQUENCES,
    SMALL,
    TOKENS,
    TOTAL_STEPS,
    arrays_of,
    random_weights,
    run_of,
    step_batch,
)
from tests.support.tiny_reinforcement import make_reinforcement_run

Numbers = dict[str, np.ndarray]


class Kind(NamedTuple):
    """A kind of run: keys of its configs, its mesh, the rounding of its activations."""

    architecture: str = "gpt2"
    train: dict[str, Any] = {}  # noqa: RUF012 — never changed
    model: dict[str, Any] = {}  # noqa: RUF012
    mesh: tuple[int, int, str] = (1, 1, "dp")
    within: float = 2e-5
    device: str = "cpu"


KINDS = {
    "on four devices": Kind(mesh=(2, 2, "fsdp_tp")),
    "float16 with a loss scale": Kind(train={"compute_dtype": "float16"}, within=0.02),
    "muon": Kind("recipe", RECIPE_OF_MUON, mesh=(2, 1, "fsdp")),
    "clipped dpo in cp": Kind(
        "llama",
        {"objective": "dpo", "start_from": "x", "clipping_max_norm": 1e-3, "ema_decay": 0.5},
        mesh=(2, 2, "cp"),
    ),
    "distill in mup": Kind(
        train={"objective": "distill", "teacher": "x"},
        model={"mup": {"base_emb_dim": 8, "base_head_dim": 2}},
        mesh=(1, 2, "tp"),
    ),
    "moments divided, as on a GPU": Kind("even-llama", mesh=(4, 1, "dp"), device="gpu"),
    "sinks and gates": Kind("sinks", mesh=(2, 2, "fsdp_tp")),
    "latent": Kind("latent", mesh=(1, 2, "cp")),
    "float8": Kind(train={"compute_dtype": "bfloat16", "matmul_dtype": "float8"}),
}
QUICK = "on four devices"
"""Not long."""


class Step(NamedTuple):
    """A measured step, then taken."""

    run: RunConfig
    found: dict[str, Any]
    before: Numbers
    after: Numbers
    result: StepResult
    inputs_BS: np.ndarray


class Programs(NamedTuple):
    """What measures and takes the steps of a run, which begins with random weights."""

    run: RunConfig
    mesh: Mesh
    start: tuple[Any, nnx.State]
    measure: Any
    step: Any


@functools.cache
def programs_of(name: str) -> Programs:
    kind = KINDS[name]
    data, last, mode = kind.mesh
    mesh = mesh_of(data, last, mode)
    keys = {"gradient_accumulation_steps": 2, "load_balancing_weight": 0.0} | kind.train
    run = run_of(kind.architecture, mode, mesh, **keys)
    model_keys = SMALL | ARCHITECTURES[kind.architecture] | kind.model
    run = run._replace(model=model_config(**model_keys))
    objective = objective_of(run.train)
    begun = create_model_and_optimizer(run, TOTAL_STEPS, mesh, random_weights(run, mesh))
    measure = make_measurement(objective, run.train, mesh)
    step = make_step(objective, run.train, mesh)
    return Programs(run, mesh, nnx.split(begun), measure, step)


def take(name: str, *, loss_limit: float = np.inf, overflows: bool = False) -> Step:
    """Measure a step and take it. `overflows` has an embedding whose square is infinite."""
    device = KINDS[name].device
    with trace_for(Target(device) if device != "cpu" else None):
        run, mesh, (graph, state), measure, take_step = programs_of(name)
        model, optimizer = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        if overflows:
            table = model.token_embedding.embedding
            table.set_value(1e38 * jnp.sign(table[...]))
        batch = batch_of(run)
        placed, limit = place_batch(mesh, *batch), jnp.float32(loss_limit)
        found = jax.device_get(measure(model, optimizer, *placed, loss_limit=limit))
        own_shapes = shapes_of(run.model, run.train.lora)
        before = arrays_of(nnx.state(model), own_shapes)
        result = jax.device_get(take_step(model, optimizer, *placed, loss_limit=limit))
        after = arrays_of(nnx.state(model, optimizer.wrt), own_shapes)
    return Step(run, found, before, after, result, batch[0].reshape(SEQUENCES, LENGTH))


def batch_of(run: RunConfig) -> tuple[Any, ...]:
    """Return the arrays of a step, with what the objective needs besides tokens."""
    inputs, targets = step_batch(run.train.gradient_accumulation_steps)
    rng = np.random.default_rng(2)
    if run.train.objective == "distill":
        logits = rng.normal(size=(*inputs.shape, TOKENS)).astype(np.float32)
        return inputs, targets, None, np.asarray(jax.nn.log_softmax(logits))
    if run.train.objective == "dpo":
        return inputs, targets, None, -rng.random(inputs.shape, np.float32)
    return inputs, targets


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == QUICK else pytest.mark.long) for n in KINDS if n != "float8"],
)
def test_statistics_are_those_of_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = take(name)
    check_arrays(step)
    config = step.run.model
    if config.mup:  # which the reference does not know
        own = {"mup": None, "query_pre_attn_scalar": config.attention_scale**-2}
        config = config.model_copy(update=own)
    weights = {name: array.astype(np.float64) for name, array in step.before.items()}
    expected = reference_statistics.activations(config, weights, step.inputs_BS, None, monkeypatch)
    assert expected.keys() == step.found.keys() - {"arrays"}
    check_numbers({n: step.found[n] for n in expected}, expected, KINDS[name].within)


def check_arrays(step: Step) -> None:
    """Weights, updates and the norm of the gradient are those of the step."""
    found, total = step.found["arrays"], 0.0
    for name, after in step.after.items():
        before = step.before[name].astype(np.float64)
        layers = len(before) if name.startswith("blocks.") else 1
        own = found[name.removeprefix("blocks.")]
        squares = np.square(np.array([before, after - before])).reshape(2, layers, -1)
        weight, update = np.sqrt(squares.mean(axis=2))
        np.testing.assert_allclose(own["weight_rms"], weight, 2e-5, err_msg=name)
        np.testing.assert_allclose(own["update_rms"], update, 1e-3, 1e-9, err_msg=name)
        total += (own["gradient_rms"].astype(np.float64) ** 2).sum() * before.size / layers
    assert found.keys() == {name.removeprefix("blocks.") for name in step.after} | {"all"}
    np.testing.assert_allclose(np.sqrt(total), step.result.gradient_norm, 1e-4)


def check_numbers(found: Any, expected: Any, within: float, place: str = "") -> None:
    """Errors are relative to the largest number of a statistic."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for name, part in expected.items():
            check_numbers(found[name], part, within, f"{place}.{name}")
        return
    assert found.shape == expected.shape, place
    np.testing.assert_allclose(found, expected, 0, within * np.abs(expected).max(), err_msg=place)


def test_a_skipped_step_has_no_update() -> None:
    step = take(QUICK, loss_limit=-1.0)
    assert step.result.skipped
    check_arrays(step)
    assert (step.found["arrays"]["all"]["update_rms"] == 0).all()


def test_a_failed_step_shows_where_it_failed() -> None:
    found = take(QUICK, overflows=True).found
    for size in ("rms", "largest"):
        assert not np.isfinite(found["activations"]["residual"][size]).any()
    assert np.isnan(found["dead_units"]).all()
    assert np.isinf(found["arrays"]["token_embedding.embedding"]["weight_rms"]).all()
    assert np.isfinite(found["arrays"]["all"]["weight_rms"]).all()
    assert (found["arrays"]["all"]["update_rms"] == 0).all()


@pytest.mark.long
def test_activations_of_fp8_are_those_of_its_matmuls() -> None:
    step = take("float8")
    check_arrays(step)
    weights = random_weights(step.run, mesh_of(1))
    model, optimizer = create_model_and_optimizer(step.run, TOTAL_STEPS, mesh_of(1), weights)
    compute = Compute(jnp.dtype(jnp.bfloat16))
    plain = largest(model, step, compute)
    assert optimizer.float8 is not None
    optimizer.float8.start(model)
    expected = largest(model, step, compute)
    assert np.abs(plain / expected - 1).max() > 0.01
    measured = step.found["activations"]["residual"]["largest"]
    np.testing.assert_allclose(measured[0], expected, rtol=2e-3)


def largest(model: Any, step: Step, compute: Any) -> np.ndarray:
    """Return the largest value after the first block."""
    states = model.forward(step.inputs_BS, compute=compute, keep_hidden_states=True).hidden_states
    return np.abs(np.asarray(states[1], np.float64)).max()


@pytest.mark.parametrize("window", [None, 70])
def test_attention_of_sequences_of_several_blocks_of_queries(window: int | None) -> None:
    rng, length, heads, kv_heads, width = np.random.default_rng(3), 150, 6, 2, 4
    query, key = (2 * rng.normal(size=(2, length, n, width)) for n in (heads, kv_heads))
    starts = np.array([np.zeros(length), np.where(np.arange(length) < 90, 0, 90)], np.int32)
    scoring = Scoring(0.7, window, 5.0, jnp.asarray(starts))
    found = attention_of_heads(jnp.float32(query), jnp.float32(key), scoring)
    distance = np.arange(length)[:, None] - np.arange(length)
    is_seen = (distance >= 0) & (distance < (window or length))
    expected_entropy, expected_logit = [], []
    for row in range(2):
        entropies, logits = np.zeros((2, length, heads))
        mask = is_seen & (np.arange(length) >= starts[row][:, None])
        for s, n in np.ndindex(length, heads):
            scores = key[row, :, n // 3] @ query[row, s, n] * 0.7
            scores = reference_gpt.soft_cap(scores, 5.0)[mask[s]]
            shares = reference_gpt.softmax(scores)
            entropies[s, n] = -(shares * np.log(shares)).sum()
            logits[s, n] = scores.max()
        expected_entropy.append(entropies.mean(axis=0))
        expected_logit.append(logits.max(axis=0))
    np.testing.assert_allclose(found.entropy_N, np.mean(expected_entropy, axis=0), rtol=2e-5)
    np.testing.assert_allclose(found.largest_logit_N, np.max(expected_logit, axis=0), rtol=2e-5)


def test_reinforcement_learning_does_not_know_the_key(tmp_path: Path) -> None:
    run = make_reinforcement_run(tmp_path / "run", tmp_path / "start", watch_interval=10)
    with pytest.raises(UserError) as raised:
        load_any_run(run.path)
    [line] = str(raised.value).splitlines()
    assert "watch_interval" in line
