"""How much memory a training step takes on each device, by sharding mode and `remat`.

From the compiler's analysis of the program for eight virtual CPU devices; nothing is run. The
model is GPT-2's shape with 8 layers of width 512, in steps of 2 microbatches of 8 sequences of 512
tokens.
"""

import itertools
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from benchmarks.one_step import train_config
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel.sharding import create_mesh
from rungs.planning.compiled_step import lower_step

SHARDINGS = (
    ShardingConfig(mode="dp", data=1),
    ShardingConfig(mode="dp", data=8),
    ShardingConfig(mode="fsdp", data=8),
    ShardingConfig(mode="tp", tensor=8),
    ShardingConfig(mode="fsdp_tp", data=4, tensor=2),
)
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
MODEL = ModelConfig(vocab_size=4096, context_length=512, emb_dim=512, n_layers=8, n_heads=8)
HEADING = ("mode", "data × tensor", "remat", "state and batch, MB", "temporary, MB")


def row(sharding: ShardingConfig, remat: Remat) -> tuple[str, ...]:
    """Return the bytes of the step's arguments, and of what it allocates while it runs."""
    data, tensor = sharding.sizes
    train = train_config(8, 2, sharding).model_copy(update={"remat": remat})
    mesh = create_mesh(sharding.sizes, devices=jax.devices()[: data * tensor])
    memory = lower_step(RunConfig(MODEL, train), mesh).compile().compiled.memory_analysis()
    sizes = (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    return sharding.mode, f"{data} × {tensor}", remat, *(f"{size / 1e6:.1f}" for size in sizes)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    rows = [row(sharding, remat) for sharding, remat in itertools.product(SHARDINGS, REMATS)]
    print(align_columns([HEADING, *rows], left=3))


if __name__ == "__main__":
    main()
