"""Watching a run: what each layer does while it trains, measured every `watch_interval` steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.common.run_log import log
from rungs.common.shown_text import counted
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.inspect.watch_activations import activation_statistics
from rungs.inspect.watch_arrays import Change, array_statistics
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.processes import is_first_process
from rungs.parallel.sharding import Layout
from rungs.run import layer_record
from rungs.run.folder import RunFolder
from rungs.run.layer_record import ARRAYS, HEADS, LARGEST_LOGIT, Rows
from rungs.step.forward import replicated
from rungs.step.objective import Objective
from rungs.step.train_step import dropout_key, step_function

Measure = Callable[..., dict[str, Any]]
LOGIT_LIMITS = (1_000, 10_000)
"""Round numbers that we chose from two papers. Logits at 1,000 usually come with loss spikes and
sometimes with divergence (Kimi Team 2025, "Kimi K2", section 2.1); a model of 10M parameters with
logits set to that learned worse (Wortsman et al. 2023, "Small-scale proxies for large-scale
Transformer training instabilities", figure 10). All their models with logits above 10,000, of the
first layer at step 2,000, diverged (figure 9)."""


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
    def _latest(self) -> Rows | None:
        """The last row of the file."""
        rows = layer_record.read(self._run.layers)
        return rows[-1:] if rows is not None and len(rows) else None

    @functools.cached_property
    def _measure(self) -> Measure:
        return make_measurement(self._objective, self._config.train, self._mesh)


def make_measurement(objective: Objective, train: TrainConfig, mesh: Mesh) -> Measure:
    """Return a compiled function of a step's arguments, see `make_step`, that returns what the
    fields of `layers.npy` are. It takes the step on copies and leaves its arguments unchanged, so
    the program of the step itself stays the same to the last bit whether or not it is watched."""
    layout = Layout.of(train.sharding, mesh)
    step = step_function(objective, train, layout, keeps_gradient=True)

    def measured(
        graph: Any, state: nnx.State, batch_ABS: tuple[Any, ...], options: dict[str, Array]
    ) -> dict[str, Any]:
        model, optimizer = nnx.merge(graph, state)
        key = dropout_key(train, optimizer.step[...])
        if optimizer.float8:
            optimizer.float8.start(model)
        activations = activation_statistics(objective, train, layout, model, batch_ABS, key)
        before = _parameters(model, optimizer)
        gradient = step(model, optimizer, *batch_ABS, **options).gradient
        change = Change(before, gradient, _parameters(model, optimizer))
        arrays = array_statistics(change, model.config)
        return replicated(layout, {ARRAYS: arrays} | activations)

    compiled = jax.jit(measured, static_argnums=0)

    def measure(
        model: GPT, optimizer: SkippingOptimizer, *batch_ABS: Any, **options: Array
    ) -> dict[str, Any]:
        graph, state = nnx.split((model, optimizer))
        return compiled(graph, state, batch_ABS, options)

    return measure


def _parameters(model: GPT, optimizer: SkippingOptimizer) -> nnx.State:
    """Return the trained parameters as they are now; the step changes the model in place."""
    return jax.tree.map(lambda array: array, nnx.state(model, optimizer.wrt))


def attention_warning(model: ModelConfig, before: Rows | None, now: Rows) -> str | None:
    """Return a line with advice if the largest attention logit of a layer has risen above one of
    `LOGIT_LIMITS` since the row `before`, None if there is none; else None."""
    if HEADS not in (now.dtype.names or ()):
        return None
    largest_L = _largest(now)
    levels_L = np.searchsorted(LOGIT_LIMITS, largest_L)
    before_L = 0 if before is None else np.searchsorted(LOGIT_LIMITS, _largest(before))
    risen = np.flatnonzero(levels_L > before_L)
    if not len(risen):
        return None
    layer = risen[np.argmax(largest_L[risen])]
    others = f" (and those of {counted(len(risen) - 1, 'other layer')})" * (len(risen) > 1)
    return (
        f"layer {layer}'s attention logits grow{others}: the largest is {largest_L[layer]:,.0f},"
        f" above {LOGIT_LIMITS[levels_L[layer] - 1]:,}; {_advice(model)}"
    )


def _largest(row: Rows) -> np.ndarray:
    """Return the largest logit of each layer in the last row; 0 for one that is not finite."""
    largest_L = row[HEADS][LARGEST_LOGIT][-1].max(axis=-1)
    return np.where(np.isfinite(largest_L), largest_L, 0)


def _advice(model: ModelConfig) -> str:
    keys = ['"qk_norm": true'] * (not model.qk_norm)
    keys += ['"attention_soft_cap": 50'] * (model.attention_soft_cap is None)
    new = f"start another run with {' or '.join(keys)} in its model.json, or " if keys else ""
    return f"{new}lower learning_rate"
