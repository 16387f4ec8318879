"""Attention by tokamax's kernels: what is around them, with plain functions in their place, and the
programs as compiled for GPUs that are not here, where the extra cuda has them."""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.model.attention import causal_kernel, check_kernel
from rungs.model.kernels import blockwise_attention, mosaic_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.parallel import target_device
from rungs.parallel.target_device import Target
from rungs.planning import compiled_step
from rungs.planning.hardware import device_by_name
from tests.support.configs import model_config, train_config

HOPPER, BLACKWELL, TURING = (Target("gpu", number) for number in ("9.0", "10.0", "7.5"))
STARTS_BS = jnp.asarray([[0] * 60 + [60] * 70, [0] * 130])
NEEDS_TOKAMAX = pytest.mark.skipif(
    not importlib.util.find_spec("tokamax"), reason="the extra cuda is not installed"
)


def plain(query: Any, key: Any, value: Any, first_S: Any, scale: Any, cap: Any) -> tuple[Any, Any]:
    """Return y_SNH of one sequence, and the softmax's maximum and sum."""
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    scores_NST = jnp.einsum("snh,tnh->nst", query, key) * scale
    scores_NST = scores_NST if cap is None else cap * jnp.tanh(scores_NST / cap)
    at_S = jnp.arange(len(query))
    seen_ST = (at_S[:, None] >= at_S) & (at_S >= first_S[:, None])
    scores_NST = jnp.where(seen_ST, scores_NST, -jnp.inf)
    sums = scores_NST.max(-1), jnp.exp(scores_NST - scores_NST.max(-1, keepdims=True)).sum(-1)
    return jnp.einsum("nst,tnh->snh", jax.nn.softmax(scores_NST), value), sums


def forward(q: Any, k: Any, v: Any, bias: Any, mask: Any, start: Any, end: Any, **keys: Any) -> Any:
    """Return what tokamax's function does, plainly."""
    assert len(q) % mosaic_attention.BLOCK == 0
    assert (bias, mask, end, keys["is_causal"]) == (None, None, None, True)
    return plain(q, k, v, start[0], keys["logits_scale"], keys["logits_soft_cap"])


def backward(q: Any, k: Any, v: Any, sums: Any, y: Any, dy: Any, *masks: Any, **keys: Any) -> Any:
    again, pull = jax.vjp(lambda *x: forward(*x, *masks, **keys), q, k, v)
    of_sums = jax.tree.map(jnp.zeros_like, sums)
    assert jax.tree.map(jnp.shape, (y, sums)) == jax.tree.map(jnp.shape, again)
    return *pull((dy, of_sums)), None


@pytest.mark.parametrize(
    ("window", "cap", "starts_BS"), [(20, 2.0, STARTS_BS), (None, None, STARTS_BS), (20, 2.0, None)]
)
def test_ranges_padding_and_gradients_are_those_of_the_blockwise_form(
    window: int | None, cap: float | None, starts_BS: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = mosaic_attention._Kernels(forward, backward)
    monkeypatch.setattr(mosaic_attention._Kernels, "of", lambda _: kernels)
    rng, scoring = np.random.default_rng(0), Scoring(0.3, window, cap, starts_BS)
    heads = 4, 2, 2, 4
    *arrays, dy = (jnp.asarray(rng.normal(size=(2, 130, n, 16)), jnp.float32) for n in heads)

    def both(module: Any) -> Any:
        attend = functools.partial(module.causal_attention, scoring=scoring)
        y, pull = jax.vjp(attend, *arrays)
        return y, *pull(dy)

    for found, expected in zip(both(mosaic_attention), both(blockwise_attention), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("target", "model", "train", "is_refused"),
    [
        (HOPPER, {"head_dim": 256, "attention_soft_cap": 50.0}, {"documents": "separate"}, False),
        (BLACKWELL, {}, {}, False),
        (BLACKWELL, {"head_dim": 256}, {}, True),
        (HOPPER, {"attention_sinks": True}, {}, True),
        (TURING, {}, {}, True),
        (HOPPER, {}, {"compute_dtype": "float32"}, True),
    ],
)
def test_a_run_that_the_kernels_cant_serve_is_refused(
    target: Target, model: Any, train: Any, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    config = train_config(attention_kernel="mosaic", **{"compute_dtype": "bfloat16"} | train)
    with target_device.trace_for(target, is_compiled=True):
        run = functools.partial(check_kernel, model_config(**model), config)
        dtype = jnp.dtype(config.compute_dtype)
        if is_refused:
            with pytest.raises(UserError, match='attention_kernel: "mosaic" can\'t be used here: '):
                run(dtype)
        else:
            run(dtype)
            query = jnp.zeros((1, 8, 2, 64), dtype)
            assert causal_kernel(query, Scoring(1.0, kernel="mosaic")) is mosaic_attention
            assert causal_kernel(query, Scoring(1.0)) is not mosaic_attention


@pytest.mark.long
@NEEDS_TOKAMAX
@pytest.mark.parametrize(("device", "head_dim"), [("h100", 256), ("b200", 128)])
def test_a_step_compiles_with_a_kernel_forward_and_two_backward(device: str, head_dim: int) -> None:
    """Inside `jax.shard_map`, with documents, a window and a soft cap."""
    kinds = {"layer_pattern": ["sliding", "global"], "sliding_window": 100}
    model = model_config(context_length=256, head_dim=head_dim, attention_soft_cap=50.0, **kinds)
    train = train_config(
        compute_dtype="bfloat16",
        attention_kernel="mosaic",
        documents="separate",
        remat="dots",
        sharding={"mode": "dp", "data": 1},
    )
    compiled_step.prepare()
    found = compiled_step.compile_apart(RunConfig(model, train), device_by_name(device)).result
    assert isinstance(found, compiled_step.Compiled)
    assert found.kernels["attention"] == {"Pallas for Mosaic GPU": 3 * 2}
