"""`--dry-run`: everything that a start does, and two steps of which nothing is kept."""

import itertools
import logging
import math
import time

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.common.text_table import format_duration
from rungs.config.run_config import RunConfig
from rungs.data.loader import TrainingData
from rungs.parallel.devices import recorded_sharding
from rungs.parallel.sharding import process_local_rows
from rungs.run.folder import RunFolder
from rungs.step.train_step import StepResult, make_train_step
from rungs.training import run_report
from rungs.training.preparation import model_and_optimizer
from rungs.training.trainer import PrefetchedBatches

_STEPS = 3
"""The first one is compiled, and the last one is measured."""

log = logging.getLogger("rungs")


def dry_run(
    run: RunFolder,
    config: RunConfig,
    data: TrainingData,
    saved: Checkpoint | None,
    weights: Weights | None,
    mesh: Mesh,
) -> None:
    """Create or restore model and optimizer, take a few steps and log what the run will take.
    Nothing on disk changes.

    Args:
        saved: the checkpoint to resume from.
        weights: the weights to start from.
    """
    model, optimizer = model_and_optimizer(config, data.total_steps, mesh, saved, weights)
    sharding = recorded_sharding(config.train, mesh)
    run_report.log_start(run, config, data, saved, weights, sharding)
    run_report.log_size(run, config, data, model, optimizer, mesh)
    first = saved.step + 1 if saved else 0
    step = make_train_step(config.train, mesh)
    limit = {"loss_limit": jax.numpy.float32(np.inf)} if config.train.skip_spikes else {}
    size = config.train.microbatch_size
    batches = PrefetchedBatches(mesh, data.batches(first, process_local_rows(mesh, size)), size)
    losses, times = [], [time.perf_counter()]
    for batch in itertools.islice(batches, _STEPS):
        result = step(model, optimizer, *batch, **limit)
        losses.append(StepResult(*jax.device_get(tuple(result))).loss)
        times.append(time.perf_counter())
    left = data.total_steps - first
    log.info(
        "dry run: the first step has loss %s (ln of vocab_size: %.4f); it took %s with compilation,"
        " another one %s; %s steps are left: about %s without validation; nothing was"
        " written into the run folder",
        "none" if losses[0] is None else f"{losses[0]:.4f}",
        math.log(config.model.vocab_size),
        *(format_duration(times[1] - times[0]), format_duration(times[-1] - times[-2])),
        *(f"{left:,}", format_duration(left * (times[-1] - times[-2]))),
    )
