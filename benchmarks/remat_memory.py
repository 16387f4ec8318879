"""What `remat` and the sharding modes save: memory of the compiled step, on each device.

    uv run benchmarks/remat_memory.py

From the compiler's own analysis of the program for eight virtual CPU devices; nothing is run. The
model is GPT-2's shape at 8 layers of width 512, in steps of 2 microbatches of 8 sequences of 512
tokens.
"""

import itertools
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import Mode, Remat, ShardingConfig, TrainConfig
from rungs.parallel.mesh import Layout, create_mesh
from rungs.step.state import AbstractState
from rungs.step.train_step import make_train_step

DEVICES = 8
MESHES: dict[Mode, tuple[int, int]] = {
    "dp": (DEVICES, 1),
    "fsdp": (DEVICES, 1),
    "tp": (1, DEVICES),
    "fsdp_tp": (4, 2),
}
REMATS: tuple[Remat, ...] = ("none", "dots", "full")
MODEL = ModelConfig(vocab_size=4096, context_length=512, emb_dim=512, n_layers=8, n_heads=8)


def bytes_of(remat: Remat, sharding: ShardingConfig) -> tuple[int, int]:
    """Bytes on each device of the state and the batch, and of all that comes and goes in a step."""
    train = TrainConfig(
        dataset="none",
        microbatch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.001,
        checkpoint_interval=1,
        remat=remat,
        sharding=sharding,
    )
    sizes = sharding.sizes
    mesh = create_mesh(sizes, devices=jax.devices()[: sizes[0] * sizes[1]])
    abstract = AbstractState(RunConfig(MODEL, train), 10, mesh)
    model, optimizer = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    place = NamedSharding(mesh, Layout(mesh).batch_spec(3))
    batch = jax.ShapeDtypeStruct((2, 8, MODEL.context_length), jnp.int32, sharding=place)
    step = make_train_step(train, mesh)
    lowered = step.lower(model, optimizer, batch, batch)  # type: ignore[attr-defined]
    analysis = lowered.compile().compiled.memory_analysis()
    return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"{'mode':8} {'data × tensor':>14} {'remat':>6} {'state':>10} {'in a step':>10}")
    one_device = [("dp", (1, 1))]
    for (mode, (data, tensor)), remat in itertools.product([*one_device, *MESHES.items()], REMATS):
        sharding = ShardingConfig.model_validate({"mode": mode, "data": data, "tensor": tensor})
        state, temporary = bytes_of(remat, sharding)
        shape = f"{data} × {tensor}"
        print(f"{mode:8} {shape:>14} {remat:>6} {state / 1e6:7.1f} MB {temporary / 1e6:7.1f} MB")


if __name__ == "__main__":
    main()
