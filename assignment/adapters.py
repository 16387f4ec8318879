"""What the tests of JAX-LM's assignment call (https://github.com/chuyishang/jax-lm): a plugin of
pytest that takes the place of their `jax_tests/adapters.py`. README.md has the command.

The environment variable AUTHOR chooses whose code it calls, `student` or `solution`. The course's
matrices are (outputs, inputs), as in PyTorch."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Array = jax.Array


def _file(name: str) -> Any:
    return importlib.import_module(f"assignment.{os.environ.get('AUTHOR', 'student')}.{name}")


layers, attention, model, loss = map(_file, ("layers", "attention", "model", "loss"))
optimizer, tokenizer, data = map(_file, ("optimizer", "tokenizer", "data"))
checkpoint, sharding = map(_file, ("checkpoint", "sharding"))

sys.modules["jax_tests.adapters"] = sys.modules[__name__]
sys.modules["jax_impl"] = sys.modules["jax_impl.distributed"] = ModuleType("jax_impl")
sys.modules["jax_impl.distributed.model"] = sharding
vars(sys.modules["jax_impl.distributed"])["model"] = sharding

RNGS = nnx.Rngs(0)
LINEAR = {
    "attn.q_proj": "MHA.Q_proj",
    "attn.k_proj": "MHA.K_proj",
    "attn.v_proj": "MHA.V_proj",
    "attn.output_proj": "MHA.O_proj",
    "ffn.w1": "SwiGLU.w1",
    "ffn.w2": "SwiGLU.w2",
    "ffn.w3": "SwiGLU.w3",
    "lm_head": "linear",
}
OTHERS = {
    "ln1": "RMSNorm1",
    "ln2": "RMSNorm2",
    "ln_final": "ln1",
    "token_embeddings": "token_embeddings",
}


def filled(module: Any, linear: Mapping[str, Any], others: Mapping[str, Any] = {}) -> Any:
    """Return a module with the given `weights`, by the dotted path of their layer."""
    matrices = {path: jnp.asarray(weight).T for path, weight in linear.items()}
    for path, weight in (matrices | dict(others)).items():
        layer = module
        for name in filter(None, path.split(".")):
            layer = layer[int(name)] if name.isdigit() else getattr(layer, name)
        assert layer.weights.get_value().shape == weight.shape, path
        layer.weights.set_value(jnp.asarray(weight))
    return module


def filled_from_course(module: Any, weights: Mapping[str, Any]) -> Any:
    """Return a module with the weights of the course's model, by its names."""
    linear: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        prefix = ""
        if path.startswith("layers."):
            number, _, path = path.removeprefix("layers.").partition(".")
            prefix = f"layers.{number}."
        (linear if path in LINEAR else others)[prefix + {**LINEAR, **OTHERS}[path]] = weight
    return filled(module, linear, others)


def run_linear(d_in: int, d_out: int, weights: Array, in_features: Array) -> Array:
    return filled(layers.Linear(RNGS, d_in, d_out), {"": weights})(in_features)


def run_embedding(vocab_size: int, d_model: int, weights: Array, token_ids: Array) -> Array:
    return filled(layers.Embedding(RNGS, vocab_size, d_model), {}, {"": weights})(token_ids)


def run_swiglu(
    d_model: int,
    d_ff: int,
    w1_weight: Array,
    w2_weight: Array,
    w3_weight: Array,
    in_features: Array,
) -> Array:
    weights = {"w1": w1_weight, "w2": w2_weight, "w3": w3_weight}
    return filled(layers.SwiGLU(RNGS, d_model, d_ff), weights)(in_features)


def run_rmsnorm(d_model: int, eps: float, weights: Array, in_features: Array) -> Array:
    return filled(layers.RMSNorm(RNGS, d_model, eps), {}, {"": weights})(in_features)


def run_silu(in_features: Array) -> Array:
    return layers.silu(in_features)


def run_rope(
    d_k: int, theta: float, max_seq_len: int, in_query_or_key: Array, token_positions: Array
) -> Array:
    rope = layers.RotaryPositionalEmbedding(d_k, theta, max_seq_len)
    return rope(in_query_or_key, token_positions)


def run_softmax(in_features: Array, dim: int) -> Array:
    return attention.softmax(in_features, dim)


def run_scaled_dot_product_attention(
    Q: Array, K: Array, V: Array, mask: Array | None = None
) -> Array:
    return attention.scaled_dot_product_attention(Q, K, V, mask)


def _projections(q: Array, k: Array, v: Array, o: Array) -> dict[str, Array]:
    return {"Q_proj": q, "K_proj": k, "V_proj": v, "O_proj": o}


def run_multihead_self_attention(
    d_model: int,
    num_heads: int,
    q_proj_weight: Array,
    k_proj_weight: Array,
    v_proj_weight: Array,
    o_proj_weight: Array,
    in_features: Array,
) -> Array:
    weights = _projections(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    layer = attention.MultiHeadSelfAttention(RNGS, d_model, num_heads)
    return filled(layer, weights)(in_features, use_rope=False)


def run_multihead_self_attention_with_rope(
    d_model: int,
    num_heads: int,
    max_seq_len: int,
    theta: float,
    q_proj_weight: Array,
    k_proj_weight: Array,
    v_proj_weight: Array,
    o_proj_weight: Array,
    in_features: Array,
    token_positions: Array | None = None,
) -> Array:
    """`token_positions` must count from 0, as the module's do."""
    del token_positions
    weights = _projections(q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    layer = attention.MultiHeadSelfAttention(RNGS, d_model, num_heads, theta, max_seq_len)
    return filled(layer, weights)(in_features, use_rope=True)


def run_transformer_block(
    d_model: int,
    num_heads: int,
    d_ff: int,
    max_seq_len: int,
    theta: float,
    weights: Mapping[str, Array],
    in_features: Array,
) -> Array:
    block = model.TransformerBlock(RNGS, d_model, num_heads, d_ff, max_seq_len, theta)
    return filled_from_course(block, weights)(in_features)


def run_transformer_lm(
    vocab_size: int,
    context_length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    rope_theta: float,
    weights: Mapping[str, Array],
    in_indices: Array,
) -> Array:
    lm = model.TransformerLM(
        RNGS, d_model, num_heads, d_ff, rope_theta, vocab_size, context_length, num_layers
    )
    return filled_from_course(lm, weights)(in_indices)


def run_cross_entropy(inputs: Array, targets: Array) -> Array:
    return loss.cross_entropy(inputs, targets)


def run_gradient_clipping(gradient_state: Any, max_l2_norm: float) -> Any:
    return optimizer.gradient_clipping(gradient_state, max_l2_norm)


def get_adamw_cls() -> Callable[..., nnx.Optimizer]:
    def create(
        model: nnx.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> nnx.Optimizer:
        config = {"type": "adamw", "lr": lr, "betas": betas, "eps": eps}
        config["weight_decay"] = weight_decay
        transform = optimizer.build_optimizer_transform(config, None, None)
        return nnx.Optimizer(model, transform, wrt=nnx.Param)

    return create


def run_get_lr_cosine_schedule(
    it: int,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> float:
    arguments = max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters
    return optimizer.get_lr_cosine_schedule(it, *arguments)


def run_get_batch(dataset: Any, batch_size: int, context_length: int) -> tuple[Array, Array]:
    return data.get_batch(RNGS, dataset, batch_size, context_length)


def run_save_checkpoint(model: Any, optimizer: Any, iteration: int, out: Any) -> None:
    checkpoint.save_checkpoint(model, optimizer, iteration, out)


def run_load_checkpoint(src: Any, model: Any, optimizer: Any) -> int:
    return checkpoint.load_checkpoint(src, model, optimizer)


def get_tokenizer(
    vocab: dict[int, bytes],
    merges: list[tuple[bytes, bytes]],
    special_tokens: list[str] | None = None,
) -> Any:
    return tokenizer.Tokenizer(vocab, merges, special_tokens)


def run_train_bpe(
    input_path: Any, vocab_size: int, special_tokens: list[str], **_: Any
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    return tokenizer.train_bpe(input_path, vocab_size, special_tokens)


def get_mesh(mesh_shape: list[int], mesh_axis_names: list[str]) -> Mesh:
    return sharding.create_mesh(mesh_shape, mesh_axis_names)


def get_sharded_batch(
    dataset: Any,
    batch_size: int,
    context_length: int,
    mesh: Mesh,
    batch_partition_spec: PartitionSpec | None = None,
) -> tuple[Array, Array]:
    tokens = dataset.data
    return data.get_batch(RNGS, tokens, batch_size, context_length, mesh, batch_partition_spec)


def get_sharded_model_and_optimizer(
    model_config: dict[str, Any],
    optimizer_config: dict[str, Any],
    mesh: Mesh,
    sharding_mode: str,
) -> tuple[Any, nnx.Optimizer]:
    config = sharding.get_sharding_config_for_mode(sharding_mode)
    sharding.validate_mesh_for_mode(mesh, sharding_mode)
    sharding.validate_model_partitioning(model_config, mesh, config)
    return sharding.create_model_and_optimizer(RNGS, model_config, optimizer_config, config, mesh)


def get_expected_batch_sharding_spec(sharding_mode: str) -> PartitionSpec:
    return PartitionSpec(*sharding.get_batch_sharding_for_mode(sharding_mode))


def get_model_param_arrays(model_instance: Any, num_layers: int) -> dict[str, Array]:
    """Return all weights, by the dotted path of their layer."""
    flat = nnx.to_flat_state(nnx.state(model_instance, nnx.Param))
    assert len({path[1] for path, _ in flat if path[0] == "layers"}) == num_layers
    return {".".join(map(str, path[:-1])): variable.get_value() for path, variable in flat}


def get_expected_model_sharding_specs(
    num_layers: int, sharding_mode: str
) -> dict[str, PartitionSpec]:
    config = sharding.get_sharding_config_for_mode(sharding_mode)
    inside = {path for path in LINEAR.values() if "." in path}
    specs: dict[str, Any] = {
        "token_embeddings": config.embedding,
        "linear": config.lm_head,
        "ln1": config.norm,
    }
    for number in range(num_layers):
        for path in inside:
            is_out = path in ("MHA.O_proj", "SwiGLU.w2")
            specs[f"layers.{number}.{path}"] = config.dense_out if is_out else config.dense_in
        specs |= {f"layers.{number}.RMSNorm{each}": config.norm for each in (1, 2)}
    return {path: PartitionSpec(*spec) for path, spec in specs.items()}


def get_optimizer_state_arrays(optimizer_instance: Any) -> list[Array]:
    leaves = jax.tree.leaves(nnx.state(optimizer_instance, nnx.optimizer.OptState))
    return [leaf for leaf in leaves if leaf.ndim]


def assert_array_sharded(
    array: Array, expected_spec: PartitionSpec, mesh: Mesh, name: str = ""
) -> None:
    expected = NamedSharding(mesh, expected_spec)
    assert array.sharding.is_equivalent_to(expected, array.ndim), name
    assert {shard.device for shard in array.addressable_shards} == set(mesh.devices.flat), name
    part = expected.shard_shape(array.shape)
    assert all(shard.data.shape == part for shard in array.addressable_shards), name
