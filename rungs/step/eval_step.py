"""The validation loss of a model, with each batch split over the devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.common.signals import Interrupted
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.loader import ValidationData, ValidationSets
from rungs.model.gpt import GPT
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import CONTEXT, Layout, place_batch, process_local_rows
from rungs.step.forward import compute_of, on_mesh, replicated
from rungs.step.gradients import REPLICATED, microbatch_of
from rungs.step.objective import Objective

EvaluationStep = Callable[..., tuple[Array, Array]]


def make_evaluation_step(
    objective: Objective, train: TrainConfig, mesh: Mesh | None = None
) -> EvaluationStep:
    """Return a compiled function of (model, inputs_BS, targets_BS), without dropout, and optionally
    starts_BS, as for `GPT.forward`, and the batch's number. It returns each sequence's summed loss,
    and how many of its targets count. `mesh` is the model's; default: one device."""
    layout, dtype = Layout.of(train.sharding, mesh), dtype_of(train)
    batch, rows = layout.batch_spec(2), layout.rows_spec()

    def of_rows(
        model: GPT,
        gatherer: WeightGatherer,
        inputs_BS: Array,
        targets_BS: Array,
        starts_BS: Array | None,
        number: Array,
    ) -> tuple[Array, Array]:
        microbatch = microbatch_of(((inputs_BS, targets_BS), number), jax.random.key(0))
        tokens_BS, chosen_BS, weights_BS = objective.given(model, microbatch)
        compute = compute_of(train, model, gatherer)
        losses_BS = model.losses(tokens_BS, chosen_BS, compute, starts_BS)
        losses_BS = losses_BS if weights_BS is None else weights_BS * losses_BS
        sums = losses_BS.sum(axis=-1), (targets_BS >= 0).sum(axis=-1)
        return collectives.psum(sums, CONTEXT)

    def evaluation_step(
        model: GPT, inputs_BS: Array, targets_BS: Array, starts_BS: Any = None, number: Any = 0
    ) -> tuple[Array, Array]:
        sums = on_mesh(layout, model, dtype, of_rows, (*(batch,) * 3, REPLICATED), (rows, rows))
        return replicated(layout, sums(inputs_BS, targets_BS, starts_BS, jnp.asarray(number)))

    return nnx.jit(evaluation_step)


class ValidationLosses(NamedTuple):
    """The losses of a run on all its validation data, in nats."""

    mean: float | None
    """On the training datasets; None if they have no validation split."""
    by_dataset: dict[str, float]
    """On each training dataset if there are several, and on each of `validation_datasets`."""


Sums = tuple[np.ndarray, np.ndarray]
"""Each sequence's summed loss, and its weight, such as how many of its targets count."""
Measure = Callable[[ValidationData, Sums], Sums]
"""From the cross-entropies of sequences to another loss of theirs."""


def cross_entropy(_: ValidationData, sums: Sums) -> Sums:
    """Return the sums unchanged."""
    return sums


def validation_losses(
    model: GPT,
    evaluation_step: EvaluationStep,
    sets: ValidationSets,
    mesh: Mesh,
    should_stop: Callable[[], bool] = lambda: False,
    measure: Measure = cross_entropy,
) -> ValidationLosses:
    """Return the losses on all validation data; arguments as for `validation_loss`."""

    def loss(data: ValidationData) -> tuple[float, dict[str, float]]:
        return validation_loss(model, evaluation_step, data, mesh, should_stop, measure)

    mean, by_dataset = loss(sets.own) if sets.own else (None, {})
    several = by_dataset if len(by_dataset) > 1 else {}
    others = {name: loss(data)[0] for name, data in sets.others.items()}
    return ValidationLosses(mean, several | others)


def validation_loss(
    model: GPT,
    evaluation_step: EvaluationStep,
    validation: ValidationData,
    mesh: Mesh,
    should_stop: Callable[[], bool] = lambda: False,
    measure: Measure = cross_entropy,
) -> tuple[float, dict[str, float]]:
    """Return the mean loss over the targets that count, in nats, and that of each dataset with a
    validation split; arguments and errors as for `sequence_losses`."""
    sums = sequence_losses(model, evaluation_step, validation, mesh, should_stop)
    sums_N, counts_N = measure(validation, sums)
    mean = float(sums_N.sum(dtype=np.float64) / counts_N.sum())
    if len(validation.datasets) == 1:
        return mean, {validation.datasets[0]: mean}
    numbers_N, size = validation.dataset_numbers, len(validation.datasets)
    totals, counts = (np.bincount(numbers_N, array_N, size) for array_N in (sums_N, counts_N))
    of_each = zip(validation.datasets, totals.tolist(), counts.tolist(), strict=True)
    return mean, {name: total / count for name, total, count in of_each if count}


def sequence_losses(
    model: GPT,
    evaluation_step: EvaluationStep,
    validation: ValidationData,
    mesh: Mesh,
    should_stop: Callable[[], bool] = lambda: False,
) -> Sums:
    """Return each sequence's summed cross-entropy, and how many of its targets count. `should_stop`
    is called before each batch, while the previous one runs. Raises Interrupted if it returns
    True."""
    size = validation.batch_size
    results: list[tuple[np.ndarray, np.ndarray]] = []
    unread: list[tuple[tuple[Array, Array], int]] = []

    def read() -> None:
        (losses_B, counts_B), rows = jax.device_get(unread.pop())
        results.append((losses_B[:rows], counts_B[:rows]))

    batches = validation.batches(process_local_rows(mesh, size))
    for number, (*arrays, rows) in enumerate(batches):
        if should_stop():
            raise Interrupted
        batch = place_batch(mesh, *arrays, size=size)
        running = evaluation_step(model, *batch, np.int32(number)), rows
        if unread:
            read()
        unread.append(running)
    read()
    sums_N, counts_N = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return sums_N, counts_N
