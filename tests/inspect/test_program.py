"""Every statistic is that of a second decoder in float64 NumPy, on one device and on meshes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from rungs.config.run_config import RunConfig
from rungs.inspect.watch import make_measurement
from rungs.model.gpt import GPT
from rungs.model.layers import Dropout
from rungs.model.lora import LOW_RANK_NAMES
from rungs.objectives.next_token import NextToken
from rungs.objectives.table import make_train_step
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import BLOCKS, dotted, place_batch
from rungs.step.state import create_model_and_optimizer, shapes_of
from rungs.step.train_step import DROPOUT
from tests.inspect import reference_statistics
from tests.support.configs import mesh_of
from tests.support.sharded_models import (
    LENGTH,
    SEQUENCES,
    TOTAL_STEPS,
    arrays_of,
    random_weights,
    run_of,
    step_batch,
)

pytestmark = pytest.mark.long
ROUNDING = 2e-5
"""Relative; a microbatch, a device or a head too many or too few changes percents."""
LORA: dict[str, Any] = {
    "lora": {"rank": 3, "alpha": 6.0, "targets": ["query", "output", "up"]},
    "start_from": "imported",
}
NO_BALANCING = {"load_balancing_weight": 0.0}


class Watched(NamedTuple):
    """A measured step."""

    run: RunConfig
    found: dict[str, Any]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]
    inputs: dict[str, int]
    batch: tuple[np.ndarray | None, ...]


def starts() -> np.ndarray:
    """Where documents start, of two microbatches."""
    rows = [[0] * 3 + [3] * 5, [0] * 8, [0, 1, 1, 1, 4, 4, 4, 4], [0] * 7 + [7]]
    return np.array([rows * 2, rows[::-1] * 2], np.int32)


def weights_of(run: RunConfig, mesh: Mesh) -> dict[str, jax.Array]:
    """Return random parameters with units of very different sizes, so that some are dead."""
    weights = random_weights(run, mesh)
    for name, array in weights.items():
        if name.endswith(("feed_forward.up.kernel", "feed_forward.up.bias")):
            sizes = np.logspace(-1.6, 0, array.shape[-1], dtype=np.float32)
            weights[name] = jax.device_put(array * sizes, array.sharding)
    return weights


def prepare(
    architecture: str, mode: str, data: int, last: int, **train: Any
) -> tuple[RunConfig, Mesh, GPT, SkippingOptimizer]:
    """Return a run on a mesh, with its model and optimizer."""
    mesh = mesh_of(data, last, mode)
    run = run_of(architecture, mode, mesh, gradient_accumulation_steps=2, **NO_BALANCING, **train)
    model, optimizer = create_model_and_optimizer(run, TOTAL_STEPS, mesh, weights_of(run, mesh))
    return run, mesh, model, optimizer


def watch(
    architecture: str, mode: str, data: int, last: int, separate: bool = False, **train: Any
) -> Watched:
    """Measure a step on a mesh, then take it."""
    run, mesh, model, optimizer = prepare(architecture, mode, data, last, **train)
    batch = (*step_batch(2), starts() if separate else None)
    placed = place_batch(mesh, *batch)
    found = make_measurement(NextToken(run.train), run.train, mesh)(model, optimizer, *placed)
    own_shapes = shapes_of(run.model, run.train.lora)
    state = nnx.state(model)
    before, trained = arrays_of(state, own_shapes), nnx.state(model, optimizer.wrt)
    gradient = reference_gradient(run, batch)
    inputs = {
        dotted(path): variable.inputs
        for path, variable in nnx.to_flat_state(trained)
        if path[0] == BLOCKS and variable.inputs and "experts" not in variable.axes
    }
    make_train_step(run.train, mesh)(model, optimizer, *placed)
    after = arrays_of(nnx.state(model, optimizer.wrt), own_shapes)
    return Watched(run, jax.device_get(found), before, after, gradient, inputs, batch)


def _flat(batch: tuple[Any, ...]) -> Any:
    """Return the arrays of a batch as (sequences, length)."""
    return tuple(None if one is None else one.reshape(SEQUENCES, LENGTH) for one in batch)


def reference_gradient(run: RunConfig, batch: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return the mean gradient over counted targets, of optax's cross-entropy on one device."""
    one = RunConfig(run.model, run.train.model_copy(update={"sharding": None}))
    weights = weights_of(one, mesh_of(1))
    model, optimizer = create_model_and_optimizer(one, TOTAL_STEPS, mesh_of(1), weights)
    graph, trained, frozen = nnx.split(model, optimizer.wrt, ...)  # type: ignore[misc]
    inputs_BS, targets_BS, starts_BS = _flat(batch)

    def loss(trained: nnx.State) -> jax.Array:
        logits_BSV = nnx.merge(graph, trained, frozen).forward(inputs_BS, starts_BS=starts_BS)[0]
        losses_BS = optax.softmax_cross_entropy_with_integer_labels(
            logits_BSV, jnp.maximum(targets_BS, 0)
        )
        return jnp.where(targets_BS >= 0, losses_BS, 0).sum() / (targets_BS >= 0).sum()

    return arrays_of(jax.jit(jax.grad(loss))(trained), shapes_of(run.model, run.train.lora))


CASES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    # architecture, mode, data, tensor or context, keys of train.json
    ("recipe", "dp", 2, 1, {"separate": True}),
    ("llama", "cp", 2, 2, {"separate": True}),
    ("experts", "fsdp_tp", 2, 2, {}),
    ("even-llama", "fsdp_tp", 2, 4, LORA),
]


@pytest.mark.parametrize(
    ("architecture", "mode", "data", "last", "train"),
    CASES,
    ids=["{}-{}-{}x{}".format(*case) for case in CASES],
)
def test_statistics_are_those_of_float64(
    architecture: str,
    mode: str,
    data: int,
    last: int,
    train: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = watch(architecture, mode, data, last, **train)
    parts = [
        {name: array.astype(np.float64) for name, array in arrays.items()}
        for arrays in (watched.before, watched.gradient, watched.after)
    ]
    trained = {name: parts[0][name] for name in parts[2]}
    _, gradient, after = parts
    expected = {"arrays": reference_statistics.arrays(trained, gradient, after, watched.inputs)}
    inputs_BS, _, starts_BS = _flat(watched.batch)
    assert inputs_BS is not None
    weights = merged(parts[0], 2.0)  # alpha ÷ rank
    arguments = watched.run.model, weights, inputs_BS, starts_BS, monkeypatch
    expected |= reference_statistics.activations(*arguments)
    assert_same(watched.found, expected)


def merged(weights: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Return weights with LoRA's low-rank additions added to them."""
    merged = dict(weights)
    for name, array in weights.items():
        if name.endswith(LOW_RANK_NAMES[0]):
            kernel = name.replace("low_rank.down", "kernel")
            up = weights[name.replace("down", "up")]
            for layer, (down, into) in enumerate(zip(array, up, strict=True)):
                addition = np.tensordot(down, into, 1)
                merged[kernel] = merged[kernel].copy()
                merged[kernel][layer] += scale * addition
    return merged


def assert_same(found: dict[str, Any], expected: dict[str, Any], place: str = "") -> None:
    assert found.keys() == expected.keys(), place
    for name, wanted in expected.items():
        here = f"{place}.{name}"
        if isinstance(wanted, dict):
            assert_same(found[name], wanted, here)
            continue
        assert found[name].shape == wanted.shape, here
        assert np.all(np.isfinite(wanted)), here
        # the gradient of a key's bias is 0 but for rounding; that of a scalar is one sum of a batch
        cancels = ".key.bias." in here or ".residual_scale.gradient" in here
        least = 1e-6 if cancels else 1e-9
        looser = {"update_rms": 1e-3, "singular_value": 0.02}  # the latter has converged this far
        within = looser.get(name, ROUNDING)
        np.testing.assert_allclose(found[name], wanted, rtol=within, atol=least, err_msg=here)


def test_dropout_is_that_of_the_step() -> None:
    run, mesh, model, optimizer = prepare("gpt2", "dp", 1, 1, drop_rate=0.5)
    batch = step_batch(2)
    measure = make_measurement(NextToken(run.train), run.train, mesh)
    found = measure(model, optimizer, *place_batch(mesh, *batch))["activations"]["residual"]["rms"]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(run.train.seed), DROPOUT), 0)
    dropout, inputs_BS = Dropout.of(0.5, key, jnp.arange(SEQUENCES)), _flat(batch)[0]

    def residual_rms(*dropout: Dropout) -> Any:
        run = nnx.jit(lambda model: model.forward(inputs_BS, *dropout, keep_hidden_states=True))
        return np.sqrt(np.square(np.asarray(run(model).hidden_states[1], np.float64)).mean())

    np.testing.assert_allclose(found[0], residual_rms(dropout), rtol=1e-5)
    assert abs(residual_rms() / found[0] - 1) > 0.01
