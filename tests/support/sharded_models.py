"""Tiny models of several architectures on meshes of virtual devices, with equal weights on all."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel.names import dotted
from rungs.parallel.sharding import place_batch
from rungs.step.state import AbstractState, Arrays
from tests.support.configs import model_config, train_config

TOTAL_STEPS = 20
SEQUENCES, LENGTH, TOKENS = 16, 8, 61
"""A step's sequences, their length, and a vocabulary that no number of devices divides."""
RARE = 7
"""A token that is in no sequence."""

SMALL: dict[str, Any] = {"vocab_size": TOKENS, "context_length": LENGTH, "emb_dim": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_heads": 8, "qkv_bias": True},
    "llama": {
        "n_layers": 3,
        "n_heads": 8,
        "n_kv_heads": 2,
        "head_dim": 4,
        "ffn_dim": 32,
        "positions": "rope",
        "norm": "rms_norm_plus_one",
        "norm_placement": "around",
        "qk_norm": True,
        "feed_forward": "swiglu",
        "attention_output_bias": False,
        "ffn_bias": False,
        "tied_embeddings": True,
        "sliding_window": 3,
        "layer_pattern": ["sliding", "global"],
        "attention_soft_cap": 5.0,
        "final_soft_cap": 5.0,
    },
    "experts": {
        "n_heads": 8,
        "ffn_dim": 24,
        "feed_forward": "swiglu",
        "n_experts": 4,
        "experts_per_token": 2,
        "norm_placement": "after",
    },
    # so small an epsilon that a row of zeros has no derivative
    "no-layers": {
        "n_layers": 0,
        "n_heads": None,
        "positions": "none",
        "norm": "rms_norm",
        "norm_epsilon": 2e-38,
    },
}

ARCHITECTURES["even-llama"] = {**ARCHITECTURES["llama"], "layer_pattern": None}


def run_of(architecture: str, mode: str, mesh: Mesh, **train: Any) -> RunConfig:
    """A run of an architecture in a mode, with keys of its training changed."""
    data, tensor = mesh.shape.values()
    sharding = {"mode": mode, "data": data, "tensor": tensor}
    settings = {"sharding": sharding, "microbatch_size": SEQUENCES // 2}
    model = model_config(**SMALL | ARCHITECTURES[architecture])
    return RunConfig(model, train_config(**settings | train))


def random_weights(run: RunConfig, mesh: Mesh) -> Arrays:
    """Random parameters, none of them 0 or 1, whose values are the same on every mesh."""
    state, rng = AbstractState(run, TOTAL_STEPS, mesh), np.random.default_rng(5)

    def placed(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        shape = state.shapes[name]
        values = 0.2 * rng.normal(size=shape) + name.endswith("scale")
        padding = [(0, whole - own) for whole, own in zip(like.shape, shape, strict=True)]
        return jax.device_put(np.pad(values, padding).astype(np.float32), like.sharding)

    return {name: placed(name, like) for name, like in state.weights.items()}


def random_model_and_optimizer(run: RunConfig, mesh: Mesh) -> tuple[GPT, MultiSteps]:
    """A model with random parameters, and an optimizer that is there in the abstract only."""
    return AbstractState(run, TOTAL_STEPS, mesh).fill(random_weights(run, mesh), {})


def step_batch(accumulation: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """inputs_ABS and targets_ABS of the same sequences, however divided into microbatches. Of some
    targets none counts, of others a few."""
    rng = np.random.default_rng(1)
    shape = (accumulation, SEQUENCES // accumulation, LENGTH)
    inputs, targets = rng.integers(RARE + 1, TOKENS, size=(2, SEQUENCES, LENGTH), dtype=np.int32)
    for row in range(SEQUENCES):
        targets[row, : row % 9] = -1
    return inputs.reshape(shape), targets.reshape(shape)


def on(mesh: Mesh, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """A batch on a mesh."""
    return place_batch(mesh, *arrays)


def arrays_of(state: nnx.State, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Arrays by dotted name, cut down to shapes; what is cut off is zero."""
    arrays = {}
    for path, variable in nnx.to_flat_state(state):
        name, array = dotted(path), np.asarray(variable.get_value())
        own = tuple(map(slice, shapes[name]))
        assert np.count_nonzero(array) == np.count_nonzero(array[own]), name
        arrays[name] = array[own]
    return arrays


def assert_close(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], within: float
) -> None:
    """Each array's largest error is below a share of its largest element; where all of an array is
    next to nothing, as the gradient of a key's bias is, of a hundredth of the largest of all."""
    assert found.keys() == expected.keys()
    largest = {name: np.abs(array).max() for name, array in expected.items()}
    least = max(largest.values()) / 100
    for name, array in expected.items():
        error = within * max(largest[name], least)
        np.testing.assert_allclose(found[name], array, rtol=0, atol=error, err_msg=name)


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """For programs that take longer to compile than to run."""
    flag = "jax_disable_most_optimizations"
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, False)


def whole_bytes(arrays: dict[str, np.ndarray] | Arrays) -> int:
    """Of all of them together."""
    return sum(int(jnp.size(array)) * array.dtype.itemsize for array in arrays.values())
