"""Tiny models of several architectures on meshes of virtual devices, with equal weights on all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rungs.config.run_config import AnyRunConfig, RunConfig
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import dotted
from rungs.step.state import AbstractState, Arrays
from tests.support.configs import model_config, train_config

TOTAL_STEPS = 20
SEQUENCES, LENGTH, TOKENS = 16, 8, 61
"""Sequences in a step, their length, and a vocabulary size that is a prime number."""
RARE = 7
"""A token that no sequence contains."""

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

RECIPE: dict[str, Any] = {
    "positions": "rope",
    "norm": "rms_norm",
    "norm_parameters": False,
    "embedding_norm": True,
    "qk_norm": True,
    "feed_forward": "relu_squared",
    "attention_output_bias": False,
    "ffn_bias": False,
    "residual_scalars": True,
    "value_embedding_every": 2,
}
"""What nanochat has in its models."""
RECIPE_OF_MUON: dict[str, Any] = {
    "optimizer": "muon",
    "orthogonalization": "polar_express",
    "normuon_beta2": 0.95,
    "cautious_weight_decay": True,
    "learning_rate_multipliers": {"embedding": 10.0, "head": 0.2, "embedding_skip": 25.0},
}
"""Every key of its optimizer; the multipliers are arbitrary."""
ARCHITECTURES["recipe"] = {**RECIPE, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 32}
ARCHITECTURES["olmo"] = {
    **{"n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 4, "ffn_dim": 32},
    **{"positions": "rope", "norm": "rms_norm", "norm_placement": "output", "qk_norm": True},
    **{"qk_norm_scope": "all_heads", "feed_forward": "swiglu", "ffn_bias": False},
    "attention_output_bias": False,
}
"""With a norm over heads that are split, and on four devices one over heads that are not."""
ARCHITECTURES["latent"] = {
    **{"n_heads": 8, "head_dim": 2, "positions": "rope", "norm": "rms_norm", "ffn_dim": 32},
    "latent_attention": {"kv_rank": 6, "query_rank": 5, "rope_dim": 4, "value_dim": 3},
}
ARCHITECTURES["sinks"] = {
    **{"n_heads": 8, "n_kv_heads": 4, "positions": "rope", "norm": "rms_norm", "ffn_dim": 32},
    **{"attention_sinks": True, "attention_output_gate": "head", "qkv_bias": True},
    **{"feed_forward": "swiglu_clamped", "sliding_window": 3},
    "layer_pattern": ["sliding", "global"],
}
DEEPSEEK: dict[str, Any] = {
    **{**ARCHITECTURES["latent"], "n_layers": 3, "n_dense_layers": 1, "dense_ffn_dim": 24},
    **{"feed_forward": "swiglu", "ffn_dim": 8, "shared_ffn_dim": 16},
    **{"n_experts": 8, "experts_per_token": 3},
    "expert_routing": {
        **{"scores": "sigmoid", "balance_bias": True, "router_bias": True},
        **{"groups": 4, "groups_per_token": 2, "weight_factor": 2.0},
    },
}
ARCHITECTURES["deepseek"] = DEEPSEEK
HYBRID: dict[str, Any] = {
    **{"n_layers": 3, "layer_pattern": ["delta_net", "delta_net", "global"], "norm": "rms_norm"},
    **{"positions": "rope", "rope_share": 0.5, "attention_output_gate": "element"},
    "delta_net": {"key_heads": 4, "key_dim": 6, "value_heads": 8, "value_dim": 5},
}
"""Most layers with Gated DeltaNet, as in Qwen3-Next."""
ARCHITECTURES["hybrid"] = {**HYBRID, "n_heads": 4, "ffn_dim": 32, "feed_forward": "swiglu"}
ARCHITECTURES["even-llama"] = {**ARCHITECTURES["llama"], "layer_pattern": None}
ARCHITECTURES["odd-llama"] = {**ARCHITECTURES["even-llama"], "emb_dim": 18}
"""So wide that four devices cannot divide it."""


def run_of(architecture: str, mode: str, mesh: Mesh, **train: Any) -> RunConfig:
    """Return a run of an architecture in a sharding mode, with some keys of its training
    changed."""
    sharding = {"mode": mode, **mesh.shape}
    settings = {"sharding": sharding, "microbatch_size": SEQUENCES // 2}
    model = model_config(**SMALL | ARCHITECTURES[architecture])
    return RunConfig(model, train_config(**settings | train))


def random_weights(run: AnyRunConfig, mesh: Mesh) -> Arrays:
    """Return random parameters, none of them 0 or 1, with the same values on every mesh."""
    state, rng = AbstractState(run, TOTAL_STEPS, mesh), np.random.default_rng(5)

    def place(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        shape = state.shapes[name]
        values = 0.2 * rng.normal(size=shape) + name.endswith("scale")
        padding = [(0, padded - own) for padded, own in zip(like.shape, shape, strict=True)]
        return jax.device_put(np.pad(values, padding).astype(np.float32), like.sharding)

    return {name: place(name, like) for name, like in state.weights.items()}


def random_model_and_optimizer(run: RunConfig, mesh: Mesh) -> tuple[GPT, SkippingOptimizer]:
    """Return a model with random parameters, and an optimizer without arrays."""
    return AbstractState(run, TOTAL_STEPS, mesh).fill(random_weights(run, mesh), {})


def step_batch(accumulation: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs_ABS and targets_ABS. The sequences are the same for any number of microbatches;
    from zero to all targets of a sequence are ignored."""
    rng = np.random.default_rng(1)
    shape = (accumulation, SEQUENCES // accumulation, LENGTH)
    inputs, targets = rng.integers(RARE + 1, TOKENS, size=(2, SEQUENCES, LENGTH), dtype=np.int32)
    for row in range(SEQUENCES):
        targets[row, : row % 9] = -1
    return inputs.reshape(shape), targets.reshape(shape)


def arrays_of(state: nnx.State, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return arrays by dotted name without their padding, which must be zero."""
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
    """Assert that each array's largest error is at most `within` times its largest element. For an
    array of tiny values, such as the gradient of a key's bias, a hundredth of the largest element
    of all arrays counts instead."""
    assert found.keys() == expected.keys()
    largest = {name: np.abs(array).max() for name, array in expected.items()}
    least = max(largest.values()) / 100
    for name, array in expected.items():
        error = within * max(largest[name], least)
        np.testing.assert_allclose(found[name], array, rtol=0, atol=error, err_msg=name)


def total_bytes(arrays: dict[str, np.ndarray] | Arrays) -> int:
    """Return the bytes of all arrays."""
    return sum(int(jnp.size(array)) * array.dtype.itemsize for array in arrays.values())
