"""Runs of every model family, large enough for meaningful estimates, and their compiled steps.
Nothing is allocated."""

from typing import Any, NamedTuple

import jax

from rungs.config.optimization_config import ComputeDtype, Remat
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode
from rungs.planning.compiled_step import lower_step, needed_bytes
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.sharded_models import RECIPE

SIZE = {"vocab_size": 8192, "context_length": 256, "emb_dim": 512, "n_layers": 4, "n_heads": 8}
LLAMA = {
    **SIZE,
    "n_kv_heads": 4,
    "ffn_dim": 1408,
    "positions": "rope",
    "norm": "rms_norm",
    "feed_forward": "swiglu",
    "attention_output_bias": False,
    "ffn_bias": False,
}
WINDOW = {"sliding_window": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**SIZE, "qkv_bias": True},
    "llama": LLAMA,
    "mistral": {**LLAMA, **WINDOW},
    "mixtral": {**LLAMA, "ffn_dim": 704, "n_experts": 4, "experts_per_token": 2},
    "gemma": {
        **LLAMA,
        **WINDOW,
        "layer_pattern": ["sliding", "global"],
        "norm": "rms_norm_plus_one",
        "norm_placement": "around",
        "feed_forward": "geglu_tanh",
        "attention_soft_cap": 50.0,
        "final_soft_cap": 30.0,
        "tied_embeddings": True,
        "embedding_scale": "sqrt_emb_dim",
    },
    "olmo": {
        **{**LLAMA, "norm_placement": "output", "qk_norm": True, "qk_norm_scope": "all_heads"},
    },
    "latent": {
        **{**LLAMA, "n_kv_heads": None},
        "latent_attention": {"kv_rank": 128, "query_rank": 192, "rope_dim": 32},
    },
    "deepseek": {
        **{**LLAMA, "n_kv_heads": None, "n_dense_layers": 1, "dense_ffn_dim": 1408},
        **{"ffn_dim": 352, "shared_ffn_dim": 352, "n_experts": 8, "experts_per_token": 2},
        "latent_attention": {"kv_rank": 128, "rope_dim": 32},
        "expert_routing": {"scores": "sigmoid", "balance_bias": True},
    },
    "hybrid": {
        **{**LLAMA, "layer_pattern": ["delta_net"] * 3 + ["global"]},
        "delta_net": {"key_heads": 4, "key_dim": 64, "value_heads": 8, "value_dim": 64},
    },
    "gpt-oss": {
        **{**LLAMA, **WINDOW, "layer_pattern": ["sliding", "global"], "attention_sinks": True},
        **{"feed_forward": "swiglu_clamped", "ffn_bias": True, "ffn_dim": 352},
        **{"n_experts": 4, "experts_per_token": 2, "expert_routing": {"router_bias": True}},
    },
    "recipe": {**SIZE, **RECIPE, "n_kv_heads": 4},
    "a-to-a": {**SIZE, "n_layers": 0, "n_heads": None, "positions": "none", "norm": "none"},
}
FAMILIES["multi-token"] = {**LLAMA, "prediction_module": True}
FAMILIES["masked"] = {**LLAMA, "bidirectional": True}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "multi-token": {"objective": "multi_token"},
    "masked": {"objective": "masked_diffusion", "target_offset": 0},
}
"""Of the families that have one of their own."""
UNOPTIMIZED: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Compile in half the time. The memory layout is the same as with optimization."""
SEQUENCES = 16
"""Sequences of a microbatch on each device."""


class PlanCase(NamedTuple):
    """A run of a model family."""

    family: str
    remat: Remat
    mode: Mode
    accumulation: int
    dtype: ComputeDtype

    @property
    def data(self) -> int:
        return 1 if self.mode == "dp" else 2

    def run(self, **changes: Any) -> RunConfig:
        """Return its configs with some keys of `train.json` changed."""
        settings = {
            "microbatch_size": SEQUENCES * self.data,
            "gradient_accumulation_steps": self.accumulation,
            "remat": self.remat,
            "scan_unroll": 1,
            "compute_dtype": self.dtype,
            "clipping_max_norm": 1.0,
            "sharding": {"mode": self.mode, "data": self.data, "tensor": 1},
            **OBJECTIVES.get(self.family, {}),
        }
        model = model_config(**FAMILIES[self.family])
        return RunConfig(model, train_config(**{**settings, **changes}))

    def __str__(self) -> str:
        return "-".join(map(str, self))


def lowered(run: RunConfig) -> jax.stages.Lowered:
    """Return the lowered step of a run, from shapes alone."""
    assert run.train.sharding is not None
    found: jax.stages.Lowered = lower_step(run, mesh_of(*run.train.sharding.sizes))
    return found


def compiled_sizes(run: RunConfig) -> tuple[int, int]:
    """Return the bytes of arguments, and of all that the compiled step needs, on each device."""
    program = lowered(run).compile(UNOPTIMIZED).compiled  # type: ignore[attr-defined]
    return program.memory_analysis().argument_size_in_bytes, needed_bytes(program, "cpu")
