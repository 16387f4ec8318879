"""The models, meshes and devices that `scaling.py` looks at."""

import dataclasses
from collections.abc import Iterator

from benchmarks.one_step import train_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.parallel.sharding import Layout
from rungs.planning.communication import abstract_layout
from rungs.planning.hardware import device_by_name

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
"""Shapes of Llama 3.2 1B and Llama 3 8B (Grattafiori et al. 2024, table 3;
https://huggingface.co/meta-llama/Llama-3.2-1B)."""


@dataclasses.dataclass(frozen=True)
class ScalingCase:
    """A model trained in a mode on a mesh, one sequence at a time on each device along `data`."""

    model: str
    mode: Mode
    data: int
    tensor: int

    def __str__(self) -> str:
        return f"{self.model} {self.mode} {self.data:,} × {self.tensor}"

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    @property
    def layout(self) -> Layout:
        return abstract_layout(self._sharding)

    @property
    def _sharding(self) -> ShardingConfig:
        return ShardingConfig(mode=self.mode, data=self.data, tensor=self.tensor)

    def run(self, microbatches: int, dtype: str = "bfloat16", sequences: int = 1) -> RunConfig:
        """Return the configs of a step.

        Args:
            sequences: in a microbatch, on each device along `data`.
        """
        train = train_config(self.data * sequences, microbatches, self._sharding)
        return RunConfig(MODELS[self.model], train.model_copy(update={"compute_dtype": dtype}))


def cases(devices: int) -> Iterator[ScalingCase]:
    """Yield each model in each mode that is sensible on so many devices."""
    for model in MODELS:
        yield ScalingCase(model, "dp", devices, 1)
        yield ScalingCase(model, "fsdp", devices, 1)
        if devices == HOST:
            yield ScalingCase(model, "tp", 1, HOST)
            yield ScalingCase(model, "fsdp_tp", 2, HOST // 2)
        else:
            yield ScalingCase(model, "fsdp_tp", devices // HOST, HOST)


HARDWARE = tuple(map(device_by_name, ("h100", "tpu-v5p")))
