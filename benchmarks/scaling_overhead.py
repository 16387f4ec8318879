"""The other side of `scaling.py`: seconds of a sharded step and of a plain one, by turns.

Prints a line of JSON: for each way to compute the step, the seconds of each turn.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.scaling_cases import LLAMA, train_config
from rungs.config.run_config import RunConfig
from rungs.config.train_config import Mode, ShardingConfig
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.optim.optimizer import MultiSteps
from rungs.parallel import jax_setup
from rungs.parallel.mesh import create_mesh, one_device, place_batch
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import make_train_step

DEVICES, SEQUENCES, LENGTH = 2, 4, 128
SMALL = {"vocab_size": 2048, "context_length": LENGTH, "emb_dim": 256, "n_layers": 4}
HEADS = {"n_heads": 8, "n_kv_heads": 4, "ffn_dim": 1024}
MESHES: dict[Mode, tuple[int, int]] = {"dp": (2, 1), "fsdp": (2, 1), "tp": (1, 2)}
Turn = Callable[[], Any]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax_setup.cache_compiled_code()
    turns = int(sys.argv[1])
    ways = {"plain": plain_turn(), "one device": sharded_turn(None)}
    ways |= {mode: sharded_turn(ShardingConfig(mode=mode, data=data, tensor=tensor))
             for mode, (data, tensor) in MESHES.items()}  # fmt: skip
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns + 1):
        for way, turn in ways.items():
            begin = time.perf_counter()
            jax.block_until_ready(turn())
            seconds[way].append(time.perf_counter() - begin)
    print(json.dumps({way: times[1:] for way, times in seconds.items()}))


def run_of(sharding: ShardingConfig | None) -> RunConfig:
    model = LLAMA.model_copy(update=SMALL | HEADS)
    return RunConfig(model, train_config(SEQUENCES, 1, sharding))


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step of one microbatch."""
    shape = (1, SEQUENCES, LENGTH + 1)
    tokens = np.random.default_rng(0).integers(SMALL["vocab_size"], size=shape, dtype=np.int32)
    return tokens[..., :-1], tokens[..., 1:]


def sharded_turn(sharding: ShardingConfig | None) -> Turn:
    """The step that training runs; on one device without a mesh."""
    run = run_of(sharding)
    mesh = create_mesh(sharding.sizes) if sharding else one_device()
    model, optimizer = create_model_and_optimizer(run, 1000, mesh)
    arrays = place_batch(mesh, *batch())
    step = make_train_step(run.train, mesh)
    return lambda: step(model, optimizer, *arrays)


def plain_turn() -> Turn:
    """The same gradient and update, as one writes them without a thought of devices."""

    def plain_step(model: GPT, optimizer: MultiSteps, inputs: Array, targets: Array) -> Array:
        def mean_loss(model: GPT) -> Array:
            return target_losses(model(inputs), targets).mean()

        loss, gradient = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradient, jnp.float32(1))
        return loss

    model, optimizer = create_model_and_optimizer(run_of(None), 1000)
    step = nnx.jit(plain_step, donate_argnums=(0, 1))
    inputs, targets = (jnp.asarray(array[0]) for array in batch())
    return lambda: step(model, optimizer, inputs, targets)


if __name__ == "__main__":
    main()
