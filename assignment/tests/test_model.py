"""TransformerBlock and TransformerLM."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from assignment.tests import reference
from assignment.tests.mistakes import check

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
    wide = x.astype(np.float64)

    def each(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack([function(row) for row in wide])

    def attend(x: np.ndarray, theta: float | None = 100.0) -> np.ndarray:
        return reference.attention(x, reference.inner(weights, "MHA"), 3, theta)

    def feed(x: np.ndarray) -> np.ndarray:
        return reference.feed_forward(x, reference.inner(weights, "SwiGLU"))

    def norm(number: int, x: np.ndarray) -> np.ndarray:
        return reference.rms_norm(x, weights[f"RMSNorm{number}.weights"])

    def after(y: np.ndarray, number: int = 2) -> np.ndarray:
        return y + feed(norm(number, y))

    mistakes = {
        "norms come after the sums; here they are before attention and feed-forward": each(
            lambda x: norm(2, (y := norm(1, x + attend(x))) + feed(y))
        ),
        "norms are of the outputs; here they are of the inputs": each(
            lambda x: (y := x + norm(1, attend(x))) + norm(2, feed(y))
        ),
        "attention isn't added to its input x": each(lambda x: after(attend(norm(1, x)))),
        "attention is added to the normalized input; add it to x itself": each(
            lambda x: after((n := norm(1, x)) + attend(n))
        ),
        "feed-forward isn't added to its input y": each(
            lambda x: feed(norm(2, x + attend(norm(1, x))))
        ),
        "feed-forward gets x; it gets y, which has attention in it": each(
            lambda x: x + attend(norm(1, x)) + feed(norm(2, x))
        ),
        "feed-forward is added to x; add it to y, which has attention in it": each(
            lambda x: x + feed(norm(2, x + attend(norm(1, x))))
        ),
        "RMSNorm1 is before both; RMSNorm2 is before feed-forward": each(
            lambda x: after(x + attend(norm(1, x)), 1)
        ),
        "attention is without RoPE: use_rope=True": each(
            lambda x: after(x + attend(norm(1, x), None))
        ),
        "theta is 10,000 whatever the argument says": each(
            lambda x: after(x + attend(norm(1, x), 10_000.0))
        ),
        "there are no norms": each(lambda x: (y := x + attend(x)) + feed(y)),
    }
    expected = each(lambda x: reference.block(x, weights, 3, 100.0))
    check(reference.call(block, jnp.asarray(x)), expected, mistakes, atol=1e-4)


def test_transformer_lm_computes_logits(code: ModuleType) -> None:
    lm = code.TransformerLM(nnx.Rngs(0), **CONFIG)
    weights = reference.randomize(lm)
    tokens = RNG.integers(23, size=(2, 16))

    def logits(**how: Any) -> np.ndarray:
        return np.stack([reference.language_model(row, weights, 3, 100.0, **how) for row in tokens])

    mistakes = {
        "ln1, the norm after the last block, is missing": logits(last_norm=False),
        "logits are those of the embedding's rows; they have a matrix of their own, linear": logits(
            tied=True
        ),
        "this is the softmax of the logits; return the logits themselves": reference.softmax(
            logits()
        ),
        "the vectors of the last layer; linear makes logits of them": logits(head=False),
        "only the first block is applied": logits(layers=1),
        "no block is applied": logits(layers=0),
    }
    check(reference.call(lm, jnp.asarray(tokens)), logits(), mistakes, atol=1e-4)


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
    wanted = {f"{name}.weights": shape for name, shape in expected.items()}
    assert not wanted.keys() - found.keys(), (
        f"missing: {', '.join(sorted(wanted.keys() - found.keys()))}. Layers have the names of the"
        " docstring, and a list of them is an nnx.List"
    )
    assert not found.keys() - wanted.keys(), (
        f"too many: {', '.join(sorted(found.keys() - wanted.keys()))}"
    )
    assert found == wanted


def test_transformer_lm_remembers_its_arguments(code: ModuleType) -> None:
    lm = code.TransformerLM(nnx.Rngs(0), **CONFIG)
    missing = [name for name in CONFIG if not hasattr(lm, name)]
    assert not missing, f"the model has no attribute {', '.join(missing)}; a checkpoint needs it"
    assert {name: getattr(lm, name) for name in CONFIG} == CONFIG
