"""The models, meshes and steps that `scaling.py` looks at."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import Mode, ShardingConfig, TrainConfig
from rungs.parallel.mesh import Layout
from rungs.planning.communication import layout_without_devices
from rungs.planning.flops import conventional_flops
from rungs.step.state import AbstractState, shapes_of
from rungs.step.train_step import make_train_step

SEQUENCE = 4096
HOST = 8
"""Devices that share a host, and so the longest tensor axis."""
SIZES = (8, 64, 512, 4096)
LLAMA = ModelConfig(
    vocab_size=128_256,
    context_length=SEQUENCE,
    emb_dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=8192,
    feed_forward="swiglu",
    norm="rms_norm",
    positions="rope",
    rope_theta=500_000,
    attention_output_bias=False,
    ffn_bias=False,
    tied_embeddings=True,
)
LARGER = {"emb_dim": 4096, "n_layers": 32, "ffn_dim": 14_336, "tied_embeddings": False}
MODELS = {"1B": LLAMA, "8B": LLAMA.model_copy(update=LARGER)}
"""Of the shapes of Llama 3.2 1B and Llama 3 8B (Grattafiori et al. 2024, table 3;
https://huggingface.co/meta-llama/Llama-3.2-1B)."""


@dataclasses.dataclass(frozen=True)
class ScalingCase:
    """A model trained in a mode on a mesh, one sequence at a time on each device along `data`."""

    model: str
    mode: Mode
    data: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    @property
    def sharding(self) -> ShardingConfig:
        return ShardingConfig(mode=self.mode, data=self.data, tensor=self.tensor)

    @property
    def layout(self) -> Layout:
        return layout_without_devices(self.sharding)

    def run(self, microbatches: int, dtype: str = "bfloat16", sequences: int = 1) -> RunConfig:
        """A step of microbatches.

        Args:
            sequences: in a microbatch, on each device along `data`.
        """
        train = train_config(self.data * sequences, microbatches, self.sharding)
        return RunConfig(MODELS[self.model], train.model_copy(update={"compute_dtype": dtype}))


def cases(devices: int) -> Iterator[ScalingCase]:
    """Each model in each mode that is sensible on so many devices."""
    for model in MODELS:
        yield ScalingCase(model, "dp", devices, 1)
        yield ScalingCase(model, "fsdp", devices, 1)
        if devices == HOST:
            yield ScalingCase(model, "tp", 1, HOST)
            yield ScalingCase(model, "fsdp_tp", 2, HOST // 2)
        else:
            yield ScalingCase(model, "fsdp_tp", devices // HOST, HOST)


def formula(model: ModelConfig) -> float:
    """FLOPs per token in sequences of `context_length`, forwards and backwards."""
    return conventional_flops(shapes_of(model), model, model.context_length)


def train_config(
    microbatch_size: int, microbatches: int, sharding: ShardingConfig | None = None
) -> TrainConfig:
    return TrainConfig(
        dataset="none",
        microbatch_size=microbatch_size,
        gradient_accumulation_steps=microbatches,
        learning_rate=0.001,
        clipping_max_norm=1.0,
        checkpoint_interval=1,
        sharding=sharding,
    )


def lowered_step(run: RunConfig, mesh: Mesh) -> jax.stages.Lowered:
    """The global step, traced from shapes: there are no arrays."""
    state = AbstractState(run, 10, mesh)
    model, optimizer = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
    train, sequence = run.train, run.model.context_length
    shape = (train.gradient_accumulation_steps, train.microbatch_size, sequence)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    step = make_train_step(train, mesh)
    lowered: jax.stages.Lowered = step.lower(model, optimizer, batch, batch)  # type: ignore[attr-defined]
    return lowered
