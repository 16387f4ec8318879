"""Steps with matmuls in FP8: delayed scaling, meshes, and programs for GPUs."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from rungs.config.run_config import RunConfig, conflicts
from rungs.config.sharding_config import ShardingConfig
from rungs.objectives.table import make_train_step
from rungs.optim.precision import AMAX_STEPS
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import dotted, place_batch
from rungs.planning.compiled_step import compile_step, is_installed
from rungs.planning.hardware import device_by_name
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import StepResult
from tests.support.configs import mesh_of, model_config, train_config

LINEARS = 7
LAYERS = 2
MODEL = model_config(
    feed_forward="swiglu", emb_dim=32, n_heads=4, n_layers=LAYERS, ffn_dim=64, n_kv_heads=2
)
TOKENS = np.asarray(jax.random.randint(jax.random.key(1), (2, 4, 9), 0, 32))


@functools.cache
def trained(
    mode: str, *sizes: int, steps: int = 4, **keys: Any
) -> tuple[list[float], SkippingOptimizer]:
    """Return the losses of some steps on the same batch, and the optimizer."""
    sharding = ShardingConfig.of(mode, (*sizes, 1)[:2])  # type: ignore[arg-type]
    keys = {"compute_dtype": "bfloat16", "matmul_dtype": "float8", "scan_unroll": 1} | keys
    train = train_config(
        sharding=sharding.model_dump(),
        gradient_accumulation_steps=2,
        warmup_period_percent=0,
        **keys,
    )
    mesh = mesh_of(*sharding.sizes, mode)
    model, optimizer = create_model_and_optimizer(RunConfig(MODEL, train), steps, mesh)
    names = {dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model))}
    batch = place_batch(mesh, TOKENS[..., :-1], TOKENS[..., 1:])
    step: Any = make_train_step(train, mesh)
    options = {"xla_backend_optimization_level": 0}  # it takes longer to compile than to run
    step = step.lower(model, optimizer, *batch).compile(options)
    losses = [float(StepResult(*step(model, optimizer, *batch)).loss or 0) for _ in range(steps)]
    assert {dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model))} == names
    return losses, optimizer


def amaxes_of(optimizer: SkippingOptimizer) -> np.ndarray:
    assert optimizer.float8 is not None
    return np.asarray(optimizer.float8.amaxes[...])


def test_losses_are_near_those_of_bfloat16_but_not_equal() -> None:
    losses, _ = trained("dp", 1)
    exact, _ = trained("dp", 1, matmul_dtype=None)
    np.testing.assert_allclose(losses, exact, rtol=0.02)
    assert losses != exact
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    "mode",
    [
        ("fsdp_tp", 2, 2),
        pytest.param(("cp", 1, 2), marks=pytest.mark.long),
    ],
)
def test_losses_and_amaxes_are_the_same_on_every_mesh(mode: tuple[Any, ...]) -> None:
    """Gradients in bfloat16 differ by rounding, and so a number may be rounded to another one of 8
    bits. In the first step the weights are the same. Of their own tokens or columns only, devices
    would have amaxes that differ by far more."""
    (losses, one), (found, optimizer) = trained("dp", 1), trained(*mode)
    np.testing.assert_allclose(found, losses, rtol=3e-3)
    first, expected = amaxes_of(optimizer)[..., 3], amaxes_of(one)[..., 3]
    np.testing.assert_allclose(first[..., :2], expected[..., :2], rtol=0.02)
    np.testing.assert_allclose(first[..., 2], expected[..., 2], rtol=0.15)


def test_amaxes_of_the_last_steps_are_kept_the_latest_first() -> None:
    _, optimizer = trained("dp", 1)
    amaxes = amaxes_of(optimizer)
    assert amaxes.shape == (LINEARS, LAYERS, 3, AMAX_STEPS)
    assert (amaxes[..., :4] > 0).all()
    assert (amaxes[..., 4:] == 0).all()
    model, _ = create_model_and_optimizer(RunConfig(MODEL, train_config()), 1)
    assert model.blocks is not None
    assert model.blocks.attention is not None
    kernel = np.asarray(model.blocks.attention.key.kernel[...])
    np.testing.assert_array_equal(amaxes[0, :, 1, 3], np.abs(kernel).max(axis=(1, 2, 3)))


def test_a_step_without_fp8_has_none_of_it() -> None:
    train = train_config(compute_dtype="bfloat16")
    model, optimizer = create_model_and_optimizer(RunConfig(MODEL, train), 1)
    batch = np.zeros((1, 4, 8), np.int32)
    step: Any = make_train_step(train)
    assert "f8E" not in step.lower(model, optimizer, batch, batch).as_text()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"compute_dtype": "float16"}, "needs compute_dtype bfloat16"),
        ({"lora": {"rank": 1, "alpha": 1, "targets": ["up"]}, "start_from": "x"}, "with lora"),
    ],
)
def test_what_fp8_does_not_go_with_is_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f'matmul_dtype: "float8".*{reason}'):
        train_config(matmul_dtype="float8", **keys)


def test_models_without_linear_layers_of_their_own_are_refused() -> None:
    train = train_config(matmul_dtype="float8")
    experts = model_config(n_experts=2, experts_per_token=1)
    assert "mixture of experts" in "".join(conflicts(experts, train))
    assert "has none" in "".join(conflicts(model_config(n_layers=0), train))
    assert not list(conflicts(MODEL, train))


@pytest.mark.long
@pytest.mark.skipif(
    not is_installed(device_by_name("h100")), reason="the extra cuda is not installed"
)
@pytest.mark.parametrize(("device", "mode"), [("h200", "fsdp:2")])
def test_all_matmuls_of_a_block_are_cublaslts_in_fp8(device: str, mode: str) -> None:
    name, data = mode.split(":")
    sharding = {"mode": name, "data": int(data), "tensor": 1}
    model = model_config(
        feed_forward="swiglu", emb_dim=256, n_heads=4, n_layers=LAYERS, ffn_dim=512
    )
    train = train_config(compute_dtype="bfloat16", matmul_dtype="float8", sharding=sharding)
    compiled = compile_step(RunConfig(model, train), device_by_name(device)).result
    assert not isinstance(compiled, str)
    calls = [line for line in compiled.program.splitlines() if 'call_target="__cublas' in line]
    in_float8 = [line for line in calls if "__cublas$lt$matmul$f8" in line]
    others = [line for line in calls if line not in in_float8]
    assert all("(loss)" in line for line in others)  # the head
    assert all(re.search(r"= \(?bf16\[", line) for line in in_float8)
    backward = [line for line in in_float8 if re.search(r'op_name="[^"]*transpose\(', line)]
    assert len(backward) == 2 * len(in_float8) // 3
    # Layers in a loop stand in the text once, or twice where the first or last one is peeled off.
    in_loop = mode != "dp:1"
    assert (
        len(in_float8) % (3 * LINEARS) == 0 if in_loop else len(in_float8) == 3 * LINEARS * LAYERS
    )
    assert in_float8
