"""Starts of equal runs that share compiled steps, whose tracing takes most of a start's time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rungs.config.optimization_config import OptimizationConfig
from rungs.model.gpt import GPT
from rungs.optim import skipping_optimizer
from rungs.step.objective import Objective
from rungs.training import dataset_learner

PLACES = {"lineage", "start_from", "teacher", "keep_checkpoints", "validation_tokens"}
"""Keys of `train.json` that a step does not depend on, and that tests vary."""
_made: dict[Any, Any] = {}


@contextlib.contextmanager
def sharing_steps() -> Iterator[None]:
    """Make each step, evaluation step and optimizer once."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (skipping_optimizer, "_transformation"),
            (skipping_optimizer, "learning_rate_schedule"),
            (dataset_learner, "make_step"),
            (dataset_learner, "make_evaluation_step"),
        ):
            patch.setattr(module, name, _once(getattr(module, name)))
        yield
    _made.clear()


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any) -> Any:
        key = make.__name__, *map(_key, arguments)
        if key not in _made:
            _made[key] = make(*arguments)
        return _made[key]

    return made


def _key(argument: Any) -> Any:
    if isinstance(argument, OptimizationConfig):
        return argument.model_dump_json(exclude=PLACES)
    if isinstance(argument, GPT):
        return argument.config.model_dump_json()
    return type(argument) if isinstance(argument, Objective) else argument
