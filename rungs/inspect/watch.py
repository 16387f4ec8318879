"""The hook of the training loop that measures and records what each layer does."""

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from rungs.common.run_log import log
from rungs.config.run_config import RunConfig
from rungs.inspect.watch_program import Measure, make_measurement
from rungs.inspect.watch_warnings import attention_warning
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.processes import is_first_process
from rungs.run import layer_record
from rungs.run.folder import RunFolder
from rungs.step.objective import Objective


class Watch:
    """Measures each `watch_interval`-th step of a run, counted from 0, and adds it to `layers.npy`;
    the first process writes for all. Does nothing without the key."""

    def __init__(self, run: RunFolder, config: RunConfig, objective: Objective, mesh: Mesh) -> None:
        self._run, self._config = run, config
        self._objective, self._mesh = objective, mesh
        self._unread: dict[int, Any] = {}

    def begin(
        self, step: int, model: GPT, optimizer: SkippingOptimizer, *batch: Any, **options: Any
    ) -> None:
        """Start measuring a step, if due, with the arguments of the step that follows."""
        interval = self._config.train.watch_interval
        if interval and self._config.model.n_layers and step % interval == 0:
            self._unread[step] = self._measure(model, optimizer, *batch, **options)

    def end(self, step: int) -> str | None:
        """Record a step, if it was measured; return a warning about it, None if there is none.
        Raises RunFailure if it can't be written."""
        if step not in self._unread:
            return None
        row = layer_record.row_of(step, jax.device_get(self._unread.pop(step)))
        if not is_first_process():
            return None
        warning = attention_warning(self._config.model, self._latest, row)
        layer_record.append(self._run.layers, row)
        self._latest = row
        if warning is not None:
            log.warning("step %d: %s", step, warning)
        return warning

    @functools.cached_property
    def _latest(self) -> layer_record.Rows | None:
        """The last row of the file."""
        rows = layer_record.read(self._run.layers)
        return rows[-1:] if rows is not None and len(rows) else None

    @functools.cached_property
    def _measure(self) -> Measure:
        return make_measurement(self._objective, self._config.train, self._mesh)
