"""The prompts of each step, and those of validation, as token ids."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rungs.common.errors import UserError
from rungs.common.strict_json import format_value
from rungs.config.reinforce_config import ReinforceConfig
from rungs.data.tokenizer import Tokenizer
from rungs.tasks.task import Item, Items, Task

_LARGEST_SHUFFLED = 1 << 20
"""Larger tasks draw items at random instead of once per pass."""
_CHECKED_ITEMS = 1000
"""Prompts of each generated task that are tokenized before the run starts."""


class Prompt(NamedTuple):
    """An item of a task with its prompt's token ids."""

    task: int
    """Index in the config's `tasks`."""
    item: Item
    tokens: list[int]


class Prompts:
    """Draws prompts of at most `longest` tokens, which depend only on the config and the step."""

    def __init__(
        self, tasks: Sequence[Task], train: ReinforceConfig, tokenizer: Tokenizer, longest: int
    ) -> None:
        self._tasks, self._train = tasks, train
        self._tokenizer, self._longest = tokenizer, longest

    def of_step(self, step: int) -> list[Prompt]:
        """Return the prompts of a step. Raises UserError if one is too long."""
        count = self._train.prompts_per_step
        return [self._drawn(number) for number in range(step * count, (step + 1) * count)]

    def of_validation(self) -> list[Prompt]:
        """Return the prompts of all held-out items. Raises UserError if one is too long."""
        return [
            self._prompt(number, item)
            for number, task in enumerate(self._tasks)
            for item in _first(task.validation, len(task.validation))
        ]

    def longest(self) -> int:
        """Return the tokens of the longest prompt among held-out and training items, the first ones
        if they are generated. Raises UserError if one is too long."""
        first = (
            self._prompt(number, item)
            for number, task in enumerate(self._tasks)
            for item in _first(task.train, len(task.train) if task.sha256 else _CHECKED_ITEMS)
        )
        return max(len(prompt.tokens) for prompt in (*self.of_validation(), *first))

    def _drawn(self, number: int) -> Prompt:
        """Return a prompt by its index in the run; tasks take turns."""
        place, task = divmod(number, len(self._tasks))
        items = self._tasks[task].train
        if len(items) > _LARGEST_SHUFFLED:
            random = np.random.default_rng([self._train.seed, task, place])
            return self._prompt(task, items[int(random.integers(len(items)))])
        passes, index = divmod(place, len(items))
        return self._prompt(task, items[_order(self._train.seed, task, passes, len(items))[index]])

    def _prompt(self, task: int, item: Item) -> Prompt:
        try:
            tokens = self._tokenizer.encode_prompt(item.prompt)
        except UserError:
            unknown = [c for c in dict.fromkeys(item.prompt) if not self._is_known(c)]
            raise UserError(
                f"task {self._tasks[task].name}: the prompt {format_value(item.prompt)} has"
                f" characters that the model's tokenizer doesn't know: {' '.join(unknown)}; change"
                " the items, or start from a model with another tokenizer"
            ) from None
        if not 0 < len(tokens) <= self._longest:
            problem = "has no tokens" if not tokens else f"has {len(tokens)} tokens"
            raise UserError(
                f"task {self._tasks[task].name}: the prompt {format_value(item.prompt)} {problem};"
                f" it must have 1 to {self._longest} (sequence_length − max_new_tokens)"
            )
        return Prompt(task, item, tokens)

    def _is_known(self, character: str) -> bool:
        with contextlib.suppress(UserError):
            return bool(self._tokenizer.encode(character))
        return False


def _first(items: Items, count: int) -> Iterator[Item]:
    return (items[index] for index in range(min(count, len(items))))


@functools.lru_cache(maxsize=8)
def _order(seed: int, task: int, passes: int, count: int) -> list[int]:
    """Return the order of a task's items in one pass over them."""
    return np.random.default_rng([seed, task, passes]).permutation(count).tolist()
