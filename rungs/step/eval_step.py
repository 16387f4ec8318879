"""A model's loss on validation data, each device with its part of every batch."""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.train_config import TrainConfig
from rungs.data.loader import ValidationData
from rungs.model.gpt import GPT, Compute
from rungs.optim.precision import dtype_of
from rungs.parallel.fsdp import Gathering
from rungs.parallel.mesh import Layout, own_rows, place_batch


class CutShort(Exception):
    """A validation was not finished, as it was wanted."""


EvaluationStep = Callable[[GPT, Array, Array], tuple[Array, Array]]


def make_evaluation_step(train: TrainConfig, mesh: Mesh | None = None) -> EvaluationStep:
    """A compiled function of (model, inputs_BS, targets_BS), without dropout, to each sequence's
    summed loss and how many of its targets count.

    Args:
        mesh: that the model was created on; one device where absent.
    """
    layout = Layout.of(train.sharding, mesh)
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    batch, rows = layout.batch_spec(2), layout.batch_spec(2)

    def evaluation_step(model: GPT, inputs_BS: Array, targets_BS: Array) -> tuple[Array, Array]:
        graph, state = nnx.split(model)
        gathering = Gathering(layout, model, dtype_of(train))

        def on_each_device(
            state: nnx.State, inputs_BS: Array, targets_BS: Array
        ) -> tuple[Array, Array]:
            model = nnx.merge(graph, state)
            gathering.outside_blocks(model)
            compute = Compute(dtype_of(train), unroll=train.scan_unroll, whole=gathering.of_layer)
            losses_BS = model.losses(inputs_BS, targets_BS, compute)
            return losses_BS.sum(axis=-1), (targets_BS >= 0).sum(axis=-1)

        told = jax.shard_map(
            on_each_device,
            mesh=layout.mesh,
            in_specs=(layout.specs(state), batch, batch),
            out_specs=(rows, rows),
        )(state, inputs_BS, targets_BS)
        return jax.lax.with_sharding_constraint(told, everywhere)

    return nnx.jit(evaluation_step)


def mean_loss(
    model: GPT,
    evaluation_step: EvaluationStep,
    validation: ValidationData,
    mesh: Mesh,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> float:
    """Mean cross-entropy over all targets that count, in nats.

    Args:
        is_unwanted: asked before each batch, while the one before it runs.

    Raises:
        CutShort: it said so.
    """
    size = validation.batch_size
    results: list[tuple[np.ndarray, np.ndarray]] = []
    unread: list[tuple[tuple[Array, Array], int]] = []

    def read() -> None:
        (losses_B, counts_B), rows = jax.device_get(unread.pop())
        results.append((losses_B[:rows], counts_B[:rows]))

    for inputs_BS, targets_BS, rows in validation.batches(own_rows(mesh, size)):
        if is_unwanted():
            raise CutShort
        batch = place_batch(mesh, inputs_BS, targets_BS, size=size)
        running = evaluation_step(model, *batch), rows
        if unread:
            read()
        unread.append(running)
    read()
    sums, counts = zip(*results, strict=True)
    return float(np.concatenate(sums).sum(dtype=np.float64) / np.concatenate(counts).sum())
