"""TransformerBlock and TransformerLM."""

from types import ModuleType

import jax.numpy as jnp
import numpy as np
from flax import nnx

from assignment.tests import reference

RNG = np.random.default_rng(3)
CONFIG = {
    "d_model": 12,
    "num_heads": 3,
    "d_ff": 20,
    "theta": 100.0,
    "vocab_size": 23,
    "context_length": 16,
    "num_layers": 2,
}


def test_transformer_block_adds_to_its_input(code: ModuleType) -> None:
    block = code.TransformerBlock(
        nnx.Rngs(0), d_model=12, num_heads=3, d_ff=20, max_seq_len=16, theta=100.0
    )
    weights = reference.randomize(block)
    x = RNG.normal(size=(2, 7, 12)).astype(np.float32)
    expected = [reference.block(row.astype(np.float64), weights, 3, 100.0) for row in x]
    np.testing.assert_allclose(
        reference.call(block, jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4
    )


def test_transformer_lm_computes_logits(code: ModuleType) -> None:
    lm = code.TransformerLM(nnx.Rngs(0), **CONFIG)
    weights = reference.randomize(lm)
    tokens = RNG.integers(23, size=(2, 16))
    expected = [reference.language_model(row, weights, 3, 100.0) for row in tokens]
    np.testing.assert_allclose(
        reference.call(lm, jnp.asarray(tokens)), expected, rtol=1e-4, atol=1e-4
    )


def test_transformer_lm_takes_shorter_sequences(code: ModuleType) -> None:
    lm = code.TransformerLM(nnx.Rngs(0), **CONFIG)
    weights = reference.randomize(lm)
    tokens = RNG.integers(23, size=5)
    expected = reference.language_model(tokens, weights, 3, 100.0)
    found = reference.call(lm, jnp.asarray(tokens))  # also without a batch
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_transformer_lm_has_the_parameters_of_the_task(code: ModuleType) -> None:
    lm = code.TransformerLM(nnx.Rngs(0), **CONFIG)
    state = nnx.to_flat_state(nnx.state(lm, nnx.Param))
    found = {".".join(map(str, path)): variable.get_value().shape for path, variable in state}
    layer = {
        **{f"MHA.{name}_proj": (12, 12) for name in "QKVO"},
        **{"SwiGLU.w1": (12, 20), "SwiGLU.w2": (20, 12), "SwiGLU.w3": (12, 20)},
        **{"RMSNorm1": (12,), "RMSNorm2": (12,)},
    }
    expected = {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    expected |= {"token_embeddings": (23, 12), "ln1": (12,), "linear": (12, 23)}
    assert found == {f"{name}.weights": shape for name, shape in expected.items()}


def test_transformer_lm_remembers_its_arguments(code: ModuleType) -> None:
    lm = code.TransformerLM(nnx.Rngs(0), **CONFIG)
    assert {name: getattr(lm, name) for name in CONFIG} == CONFIG
