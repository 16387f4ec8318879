"""`--dry-run`: everything that a start does, and a few steps of which nothing is kept."""

import logging
import math
import time
from typing import Any

from jax.sharding import Mesh

from rungs.common.text_table import format_duration
from rungs.training.learner import NEVER, Inputs, Start
from rungs.training.run_length import RunLength

_STEPS = 3
"""The first one is compiled, and the last one is measured."""

log = logging.getLogger("rungs")


def dry_run(start: Start, inputs: Inputs[Any], mesh: Mesh, length: RunLength) -> None:
    """Create or restore model and optimizer, take a few steps and log what the run will take.
    Nothing on disk changes."""
    learner = inputs.learner(start, mesh, ())
    learner.log_start(start, mesh)
    losses, times = [], [time.perf_counter()]
    for step in range(start.first_step, min(start.first_step + _STEPS, length.total_steps)):
        taken = learner.take(step, NEVER, length.learning_rate(step))
        losses.append(learner.read(step, taken)[1].loss)
        times.append(time.perf_counter())
    left = length.total_steps - start.first_step
    log.info(
        "dry run: the first step has loss %s (ln of vocab_size: %.4f); it took %s with compilation,"
        " another one %s; %s steps are left: about %s without validation; nothing was"
        " written into the run folder",
        "none" if losses[0] is None else f"{losses[0]:.4f}",
        math.log(start.config.model.vocab_size),
        *(format_duration(times[1] - times[0]), format_duration(times[-1] - times[-2])),
        *(f"{left:,}", format_duration(left * (times[-1] - times[-2]))),
    )
