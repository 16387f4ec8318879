"""Tasks of the library reasoning-gym (arXiv 2505.24760), the extra `reasoning`. Its items are a
pure function of a seed and an index, mostly of their sum, so training and validation use distant
seeds. As small tasks repeat prompts, training also excludes held-out prompts. A hash rule would
waste nine of ten items, which some tasks make slowly."""

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

from rungs.common.errors import UserError, did_you_mean, reason
from rungs.common.shown_text import install_line
from rungs.common.strict_json import format_value
from rungs.config.reinforce_config import REASONING_GYM, TaskConfig
from rungs.tasks.task import ITEMS, Item, Task, TrainingItems, held_out_items

VERIFIER = "reasoning-gym"
REWARD = """
from reasoning_gym.factory import get_score_answer_fn

def reward(prompt, completion, answer, info):
    entry = {"question": prompt, "answer": answer, "metadata": info}
    try:
        return float(get_score_answer_fn(info["source_dataset"])(completion.strip(), entry))
    except Exception:  # some raise on texts that don't look like an answer
        return 0.0
"""
"""Source of the items' verifier. Some of the library's scorers run `eval` on a completion, so it
runs in a `RewardProcess`, like a user's function."""
_SEED_STRIDE = 1_000_003
_SIZE = 256
"""Items of one of the library's datasets; some build tables of this size."""
_DATASETS_KEPT = 8


def open_task(config: TaskConfig) -> Task:
    """Return a task of the library. Raises UserError if the library is missing, has no such task or
    settings, or the task has no answers."""
    name = config.reasoning_gym_name or ""
    dataset = _datasets(name, config)

    def draw(number: int) -> Item:
        place = number % _SIZE
        entry = dataset(number - place)[place]
        if not isinstance(answer := entry["answer"], str):
            problem = f"has items without an answer ({format_value(answer)}); use another task"
            raise UserError(f"{config.source}: {problem}")
        return Item(
            entry["question"], answer, json.loads(json.dumps(entry["metadata"], default=str))
        )

    validation = held_out_items(config.source, draw, lambda _: True, config.validation_items)
    prompts = {item.prompt for item in validation}
    train = TrainingItems(
        config.source, draw, lambda item: item.prompt in prompts, config.train_items
    )
    return Task(
        name=name,
        train=train,
        validation=validation,
        verifier=VERIFIER,
        worked=lambda item: item.answer,
        short=lambda item: item.answer,
    )


def _datasets(name: str, config: TaskConfig) -> Callable[[int], Any]:
    """Return a function from a number to the dataset of items from it on."""
    try:
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise UserError(
            f"reasoning-gym is not installed ({reason(error)}); install it:"
            f" {install_line('reasoning')}"
        ) from None
    if name not in known:
        advice = did_you_mean(name, known, f"it has {len(known)}", prefix=REASONING_GYM)
        raise UserError(f'source: reasoning-gym has no task "{name}"; {advice}')
    dataset_type, settings_type = known[name]
    own = [field.name for field in dataclasses.fields(settings_type)]
    own = [key for key in own if key not in ("seed", "size")]  # those of the task's config
    if unknown := [key for key in config.settings if key not in own]:
        advice = did_you_mean(unknown[0], own, f"the keys are {', '.join(own)}")
        raise UserError(f"settings of {config.source}: {unknown[0]}: unknown key; {advice}")
    # below 2**32, NumPy's limit for seeds, after any of our numbers is added
    seed = config.seed * _SEED_STRIDE % (2 * ITEMS)

    @functools.lru_cache(maxsize=_DATASETS_KEPT)
    def dataset(first: int) -> Any:
        try:
            return dataset_type(settings_type(**config.settings, seed=seed + first, size=_SIZE))
        except Exception as error:  # it checks by assertions, and wrong types raise anything
            raise UserError(f"settings of {config.source}: {reason(error)}") from None

    return dataset
