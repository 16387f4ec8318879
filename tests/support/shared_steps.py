"""Starts of equal runs that share compiled steps, whose tracing takes most of a start's time."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from flax import nnx

from rungs.config.optimization_config import OptimizationConfig
from rungs.model.gpt import GPT
from rungs.model.rollouts import RolloutSampler
from rungs.optim import skipping_optimizer
from rungs.parallel import target_device
from rungs.reinforcement import policy_learner, policy_update
from rungs.step.objective import Objective
from rungs.step.shortcuts import Shortcuts
from rungs.training import dataset_learner

PLACES = {"lineage", "start_from", "teacher", "keep_checkpoints", "validation_tokens"}
"""Keys of `train.json` that a step does not depend on, and that tests vary."""
SHARED = (
    (skipping_optimizer, "_transformation"),
    (skipping_optimizer, "learning_rate_schedule"),
    (dataset_learner, "make_step"),
    (dataset_learner, "make_evaluation_step"),
    (policy_update, "make_step"),
    (policy_update, "make_log_prob_step"),
)
_made: dict[Any, Any] = {}


@contextlib.contextmanager
def sharing_steps() -> Iterator[None]:
    """Make each step, optimizer and sampler once. A test that replaces another function that a step
    calls needs a config of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in SHARED:
            patch.setattr(module, name, _once(getattr(module, name)))
        patch.setattr(policy_learner, "RolloutSampler", _sampler)
        yield
    _made.clear()


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any) -> Any:
        key = make.__name__, *_traced(), *map(_key, arguments)
        if key not in _made:
            _made[key] = make(*arguments)
        return _made[key]

    return made


def _sampler(model: GPT, *rest: Any) -> RolloutSampler:
    key = "sampler", *_traced(), _key(model), *rest
    sampler: RolloutSampler = _made.setdefault(key, None) or RolloutSampler(model, *rest)
    _made[key] = sampler
    sampler.refresh(model)
    return sampler


def _traced() -> Iterator[Any]:
    """Yield what a step is traced for, and the methods of the model, which tests replace."""
    yield target_device.target()
    yield from map(id, vars(GPT).values())


def _key(argument: Any) -> Any:
    if isinstance(argument, OptimizationConfig):
        return argument.model_dump_json(exclude=PLACES)
    if isinstance(argument, GPT):
        return argument.config.model_dump_json(), len(jax.tree.leaves(nnx.state(argument)))
    if isinstance(argument, Objective):
        return type(argument), *_scalars([*vars(argument).values()])
    if isinstance(argument, Shortcuts):
        return tuple(argument.lengths)
    return tuple(argument) if isinstance(argument, list) else argument


def _scalars(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, bool | int | float | str):
            yield value
        elif isinstance(value, functools.partial):
            yield from _scalars([*value.args])
