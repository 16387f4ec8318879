"""`model.py` against float64 NumPy, against JAX's own attention, and by what it must not do."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_gpt
from conftest import model_config
from flax import nnx

import config
from attention import attention, causal_mask
from layers import Dropout
from model import GPT
from state import named_arrays

ROOT = Path(__file__).parents[1]
RUNS = sorted(path.parent for path in (ROOT / "runs").glob("*/model.json"))

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "a-to-a": {"n_layers": 0, "positions": "none", "norm": "none"},
    "positions-only": {"n_layers": 0, "norm": "none"},
    "sinusoidal": {"positions": "sinusoidal"},
    "one-head": {"n_heads": 1, "n_layers": 1},
    "no-residual": {"residual": False, "norm": "none"},
    "no-norm": {"norm": "none"},
    "norm-after": {"norm_placement": "after"},
    "no-feed-forward": {"feed_forward": "none"},
    "exact-gelu": {"feed_forward": "gelu", "ffn_dim": 24},
    "qkv-bias": {"qkv_bias": True},
    "truncated-normal": {"init": "truncated_normal"},
}


def lively(model: GPT, key: jax.Array) -> GPT:
    """The model with every parameter random, so that none is hidden by a zero or a one."""
    state = nnx.state(model)
    for index, (_, param) in enumerate(nnx.to_flat_state(state)):
        noise = jax.random.normal(jax.random.fold_in(key, index), param.get_value().shape)
        param.set_value(param.get_value() + 0.2 * noise)
    nnx.update(model, state)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_float64_reference(variant: str, key: jax.Array) -> None:
    architecture = model_config(**VARIANTS[variant])
    model = lively(GPT(architecture, key), key)
    tokens_BS = np.asarray(jax.random.randint(key, (3, 7), 0, architecture.vocab_size))
    weights = {name: np.asarray(a, np.float64) for name, a in named_arrays(model).items()}
    expected = np.stack([reference_gpt.logits(architecture, weights, t) for t in tokens_BS])
    found = model(jnp.asarray(tokens_BS))
    assert found.dtype == jnp.float32
    # float32 rounding: about 1e-7 a product, over sums of up to 64 terms and two blocks
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "causal"])
@pytest.mark.parametrize("batched", [False, True], ids=["three-axes", "four-axes"])
def test_attention(masked: bool, batched: bool, key: jax.Array) -> None:
    shape = (2, 6, 3, 5) if batched else (6, 3, 5)
    query, key_, value = jax.random.normal(key, (3, *shape))
    mask = causal_mask(6) if masked else None
    found = attention(query, key_, value, mask)
    np.testing.assert_allclose(
        found, jax.nn.dot_product_attention(query, key_, value, mask=mask), rtol=1e-5, atol=1e-6
    )
    arrays = [np.asarray(a, np.float64).reshape(-1, 6, 3, 5) for a in (query, key_, value)]
    numpy_mask = None if mask is None else np.asarray(mask)
    expected = np.stack(
        [reference_gpt.attention(q, k, v, numpy_mask) for q, k, v in zip(*arrays, strict=True)]
    )
    np.testing.assert_allclose(found, expected.reshape(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if VARIANTS[v].get("n_layers") != 0])
def test_no_logit_depends_on_a_later_token(variant: str, key: jax.Array) -> None:
    architecture = model_config(**VARIANTS[variant])
    model = lively(GPT(architecture, key), key)
    length = architecture.context_length
    tokens_BS = jax.random.randint(key, (1, length), 0, architecture.vocab_size)
    embedded_BSD = model.embed(tokens_BS, jnp.arange(length))

    slope_SVTD = jax.jacobian(lambda x_BSD: model.decode(x_BSD).logits_BSV[0])(embedded_BSD)[
        :, :, 0
    ]
    influence_ST = np.abs(slope_SVTD).max(axis=(1, 3))
    later = np.triu(np.ones((length, length), bool), k=1)
    assert (influence_ST[later] == 0).all()
    assert (influence_ST[~later] > 0).all()


def test_rows_of_a_batch_do_not_meet(key: jax.Array) -> None:
    model = lively(GPT(model_config(), key), key)
    tokens_BS = jax.random.randint(key, (4, 8), 0, 32)
    alone = jnp.concatenate([model(row[None]) for row in tokens_BS])
    np.testing.assert_allclose(model(tokens_BS), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_initial_loss_of_committed_runs_is_that_of_a_guess(run: Path, key: jax.Array) -> None:
    architecture = config.load_run(run).model
    model = nnx.jit(lambda: GPT(architecture, key))()
    length = min(64, architecture.context_length)
    tokens_BS = jax.random.randint(key, (4, length + 1), 0, architecture.vocab_size)
    logits_BSV = nnx.jit(lambda model, tokens: model(tokens))(model, tokens_BS[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits_BSV), tokens_BS[:, 1:, None], axis=-1)
    assert -picked.mean() == pytest.approx(math.log(architecture.vocab_size), rel=0.02)


def test_gpt2_initialisation(key: jax.Array) -> None:
    architecture = model_config(vocab_size=512, emb_dim=128, n_layers=8)
    weights = named_arrays(GPT(architecture, key))
    for name, array in weights.items():
        if name.endswith("bias"):
            assert (array == 0).all()
        elif name.endswith("scale"):
            assert (array == 1).all()
        else:
            residual = name.endswith(("attention.output.kernel", "down.kernel"))
            sigma = 0.02 / math.sqrt(16) if residual else 0.02
            # the standard error of a standard deviation is σ/√(2n)
            error = 5 * sigma / math.sqrt(2 * array.size)
            assert float(array.std()) == pytest.approx(sigma, abs=error)
    layers = weights["blocks.attention.query.kernel"]
    assert not np.array_equal(layers[0], layers[1])


def test_truncated_normal_initialisation(key: jax.Array) -> None:
    architecture = model_config(emb_dim=128, ffn_dim=384, init="truncated_normal")
    kernel = named_arrays(GPT(architecture, key))["blocks.feed_forward.up.kernel"]
    sigma = math.sqrt(2 / (128 + 384))
    assert float(jnp.abs(kernel).max()) <= 3 * sigma
    # cutting a normal at ±3σ leaves 0.98658 of its standard deviation
    assert float(kernel.std()) == pytest.approx(0.98658 * sigma, rel=0.01)


def test_dropout_keeps_the_mean_and_each_fold_has_its_own_mask(key: jax.Array) -> None:
    dropout = Dropout(0.25, key)
    x = jnp.ones(40_000)
    dropped = dropout(x)
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert float(dropped.mean()) == pytest.approx(1, abs=0.02)
    assert not np.array_equal(dropout.fold(1)(x), dropout.fold(2)(x))


def test_dropout_acts_in_every_block_and_only_when_asked(key: jax.Array) -> None:
    model = lively(GPT(model_config(n_layers=2), key), key)
    tokens_BS = jnp.zeros((1, 8), jnp.int32)
    quiet = model(tokens_BS)
    assert np.array_equal(quiet, model(tokens_BS, Dropout(0.0, key)))
    once, again = model(tokens_BS, Dropout(0.5, key)), model(tokens_BS, Dropout(0.5, key))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, quiet)


def test_bfloat16_stays_close_to_float32(key: jax.Array) -> None:
    model = GPT(model_config(), key)
    tokens_BS = jax.random.randint(key, (2, 8), 0, 32)
    exact, rounded = model(tokens_BS), model(tokens_BS, compute_dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.float32
    assert not np.array_equal(exact, rounded)
    # bfloat16 keeps 8 bits: about 0.4% a rounding
    np.testing.assert_allclose(rounded, exact, atol=0.03 * float(jnp.abs(exact).max()))
