"""Mode dp as on accelerators, where each device updates its part, against one device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.objectives.table import make_train_step
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import Layout, place_batch
from rungs.parallel.target_device import Target, trace_for
from rungs.step.state import create_model_and_optimizer, named_arrays
from rungs.step.train_step import StepResult, update_parts
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.long import long_except
from tests.support.sharded_models import (
    assert_close,
    random_weights,
    run_of,
    step_batch,
)

DEVICES = 4
WIDE = {
    "vocab_size": 131,
    "emb_dim": 128,
    "n_heads": 4,
    "tied_embeddings": True,
    "norm": "rms_norm",
    "attention_output_bias": False,
}
"""So wide that Adafactor factors its moments."""
ROUNDING = 1e-4
"""Share of an array's largest element, as in `tests/parallel/test_gradients.py`."""
ORTHOGONAL_ROUNDING = 1e-3
"""Muon's iterations enlarge rounding."""


def arrays(module: GPT | SkippingOptimizer) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in named_arrays(module).items()}


def places(*modules: GPT | SkippingOptimizer) -> list[Any]:
    return [array.sharding for module in modules for array in named_arrays(module).values()]


def updated(optimizer_name: str, devices: int) -> tuple[dict[str, np.ndarray], ...]:
    """Return how two updates with the same random gradients, the first one clipped, change weights,
    and the moments after them."""
    mesh, sharding = mesh_of(devices), {"mode": "dp", "data": devices}
    train = train_config(
        optimizer=optimizer_name, sharding=sharding, clipping_max_norm=30.0, warmup_period_percent=0
    )
    run = RunConfig(model_config(**WIDE), train)
    model, optimizer = create_model_and_optimizer(run, 9, mesh, random_weights(run, mesh))
    update = nnx.jit(functools.partial(update_parts, Layout(mesh)), donate_argnums=(0, 1))
    before, at_first = arrays(model), places(model, optimizer)
    for seed, size in enumerate((1.0, 0.1)):
        update(model, optimizer, random_gradient(model, seed, size), jnp.float32(1), False)
    assert places(model, optimizer) == at_first
    return {name: array - before[name] for name, array in arrays(model).items()}, arrays(optimizer)


def random_gradient(model: GPT, seed: int, size: float) -> nnx.State:
    rng = np.random.default_rng(seed)

    def random(array: jax.Array) -> np.ndarray:
        return size * rng.standard_normal(array.shape, np.float32)

    return jax.tree.map(random, nnx.state(model))


@pytest.mark.parametrize("optimizer", long_except({"adafactor"}, ["adamw", "muon", "adafactor"]))
def test_every_optimizer_updates_parts_as_it_updates_the_whole(optimizer: str) -> None:
    expected = updated(optimizer, 1)
    with trace_for(Target("gpu")):
        found = updated(optimizer, DEVICES)
    within = ORTHOGONAL_ROUNDING if optimizer == "muon" else ROUNDING
    for part, whole in zip(found, expected, strict=True):
        assert_close(part, whole, within)


class Case(NamedTuple):
    """A training, on one device and on several."""

    architecture: str
    microbatches: int
    train: dict[str, Any]
    within: float = ROUNDING


LORA = {
    "lora": {"rank": 4, "alpha": 6.0, "targets": ["query", "output", "up"]},
    "start_from": "imported",
}
CASES = {
    "indivisible": Case("odd-llama", 1, {}),
    "no-layers": Case("no-layers", 1, {}),
    "experts-accumulated": Case("experts", 2, {"load_balancing_weight": 1.0}),
    "low-rank-accumulated": Case("even-llama", 2, LORA),
    "float16-accumulated": Case("gpt2", 2, {"compute_dtype": "float16"}, 1e-2),
}
LIMITS = [np.inf, -np.inf, np.inf, np.inf]
"""Of the loss of each step: the second one is skipped."""
LOSS_SCALES = [64.0, 64.0, 2.0**60, 64.0]
"""In float16. With the third one, gradients overflow."""


def trained(case: Case, devices: int) -> tuple[GPT, SkippingOptimizer, list[StepResult]]:
    mesh = mesh_of(devices)
    # a large epsilon: else Adam divides by gradients that are next to nothing but rounding
    options = {"epsilon": 1e-3, "clipping_max_norm": 0.5, "weight_decay": 0.5}
    sizes = {"gradient_accumulation_steps": case.microbatches, "warmup_period_percent": 0}
    run = run_of(case.architecture, "dp", mesh, **options | sizes | case.train)
    model, optimizer = create_model_and_optimizer(run, 9, mesh, random_weights(run, mesh))
    batch = place_batch(mesh, *step_batch(case.microbatches))
    step, results, at_first = make_train_step(run.train, mesh), [], places(model, optimizer)
    for limit, scale in zip(LIMITS, LOSS_SCALES, strict=True):
        if optimizer.loss_scale:
            set_value(optimizer.loss_scale.scale, scale)
        before = arrays(model)
        results.append(jax.device_get(step(model, optimizer, *batch, loss_limit=np.float32(limit))))
        changed = any((array != before[name]).any() for name, array in arrays(model).items())
        assert changed == is_applied(results[-1])
    assert places(model, optimizer) == at_first
    return model, optimizer, results


def set_value(variable: nnx.Variable, value: float) -> None:
    place = variable.get_value().sharding
    variable.set_value(jax.device_put(np.float32(value), place))


def is_applied(result: StepResult) -> bool:
    return bool(result.finite_A.any() and not result.skipped)


@pytest.mark.parametrize("name", long_except({"no-layers"}, CASES))
def test_steps_taken_and_skipped_have_the_results_of_one_device(name: str) -> None:
    case = CASES[name]
    one_model, one_optimizer, expected = trained(case, 1)
    with trace_for(Target("gpu")):
        model, optimizer, results = trained(case, DEVICES)
    is_float16 = case.train.get("compute_dtype") == "float16"
    assert [is_applied(result) for result in results] == [True, False, not is_float16, True]
    for result, one in zip(results, expected, strict=True):
        np.testing.assert_allclose(result.losses_A, one.losses_A, rtol=case.within / 10)
        np.testing.assert_allclose(result.gradient_norm, one.gradient_norm, rtol=case.within)
        assert result.overflowed_A.tolist() == one.overflowed_A.tolist()
        assert (result.loss_scale, result.skipped) == (one.loss_scale, one.skipped)
    assert_close(arrays(model), arrays(one_model), case.within)
    assert_close(arrays(optimizer), arrays(one_optimizer), case.within)
