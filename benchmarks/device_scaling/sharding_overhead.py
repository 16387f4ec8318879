"""Time a sharded step and a plain one, in turns: `sharding_overhead.py TURNS`, for `scaling.py`.

Prints a line of JSON: for each way to compute the step, the seconds of each turn.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.device_scaling.cases import LLAMA
from benchmarks.one_step import TOTAL_STEPS, random_sequences, train_config
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.objectives.table import make_train_step
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import jax_setup
from rungs.parallel.sharding import create_mesh, one_device, place_batch
from rungs.step.state import create_model_and_optimizer

SMALL = {
    "vocab_size": 2048,
    "context_length": 128,
    "emb_dim": 256,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_dim": 1024,
}
SHARDINGS = {
    "one device": None,
    "dp": ShardingConfig(mode="dp", data=2),
    "fsdp": ShardingConfig(mode="fsdp", data=2),
    "tp": ShardingConfig(mode="tp", tensor=2),
}
TakeStep = Callable[[], Any]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax_setup.enable_compilation_cache()
    turns = int(sys.argv[1])
    steps = {"plain": plain_step()}
    steps |= {name: sharded_step(sharding) for name, sharding in SHARDINGS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - begin)
    print(json.dumps({name: times[1:] for name, times in seconds.items()}))


def run_of(sharding: ShardingConfig | None) -> RunConfig:
    return RunConfig(LLAMA.model_copy(update=SMALL), train_config(4, 1, sharding))


def sharded_step(sharding: ShardingConfig | None) -> TakeStep:
    """Return the step that training runs; on one device without a mesh."""
    run = run_of(sharding)
    mesh = create_mesh(sharding.sizes) if sharding else one_device()
    model, optimizer = create_model_and_optimizer(run, TOTAL_STEPS, mesh)
    sequences = random_sequences(run)
    batch = place_batch(mesh, sequences[..., :-1], sequences[..., 1:])
    step = make_train_step(run.train, mesh)
    return lambda: step(model, optimizer, *batch)


def plain_step() -> TakeStep:
    """Return the same gradient and update as one writes them without a thought of devices."""

    def plain_step(
        model: GPT, optimizer: SkippingOptimizer, inputs: Array, targets: Array
    ) -> Array:
        def mean_loss(model: GPT) -> Array:
            return target_losses(model(inputs), targets).mean()

        loss, gradient = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradient, jnp.float32(1))
        return loss

    run = run_of(None)
    model, optimizer = create_model_and_optimizer(run, TOTAL_STEPS)
    step = nnx.jit(plain_step, donate_argnums=(0, 1))
    (sequences,) = jnp.asarray(random_sequences(run))
    return lambda: step(model, optimizer, sequences[:, :-1], sequences[:, 1:])


if __name__ == "__main__":
    main()
