"""The prompts of steps and validations; their completions, which the first process has verified."""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rungs.common.errors import UserError
from rungs.common.signals import Interrupted
from rungs.common.strict_json import format_value
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import ReinforceRunConfig
from rungs.data.text.tokenizer import Tokenizer
from rungs.model.rollouts import Rollout, RolloutRequest, RolloutSampler
from rungs.parallel.processes import broadcast_from_first
from rungs.reinforcement.rollout_files import Completion, Prompt, known_verdicts
from rungs.tasks.task import Item, Task, Verdict
from rungs.tasks.verifier import Verifier

_LARGEST_SHUFFLED = 1 << 20
"""Larger tasks draw items at random instead of once per pass."""
_CHECKED_ITEMS = 1000
"""Prompts of each generated task that are tokenized before the run starts."""
TRAINING, VALIDATION = 0, 1
"""Part of the seed, so that steps and validations use different random numbers."""


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
            for item in task.validation
        ]

    def longest(self) -> int:
        """Return the tokens of the longest prompt among held-out and training items, the first ones
        if they are generated. Raises UserError if one is too long."""
        first = (
            self._prompt(number, task.train[index])
            for number, task in enumerate(self._tasks)
            for index in range(len(task.train))[: None if task.sha256 else _CHECKED_ITEMS]
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
            unknown = []
            for character in dict.fromkeys(item.prompt):
                try:
                    self._tokenizer.encode(character)
                except UserError:
                    unknown.append(character)
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


@functools.lru_cache(maxsize=8)
def _order(seed: int, task: int, passes: int, count: int) -> list[int]:
    """Return the order of a task's items in one pass over them."""
    return np.random.default_rng([seed, task, passes]).permutation(count).tolist()


class Seconds(NamedTuple):
    """Seconds per phase."""

    sampling: float
    verifying: float


class CompletionSource:
    """Samples completions, which stop tokens end, and has their task's verifier judge them."""

    def __init__(
        self,
        config: ReinforceRunConfig,
        sampler: RolloutSampler,
        tokenizer: Tokenizer,
        stop_tokens: tuple[int, ...],
        verifiers: Sequence[Verifier],
    ) -> None:
        size = config.train.sampling_batch_size or config.train.sequences_per_step
        self._rows_per_device = -(-size // sampler.devices)
        self._seed = config.train.seed
        self._sampler, self._tokenizer, self._verifiers = sampler, tokenizer, verifiers
        self._request = RolloutRequest(
            batch_size=self._rows_per_device * sampler.devices,
            prompt_tokens=longest_prompt(config),
            new_tokens=config.train.max_new_tokens,
            temperature=config.train.temperature,
            stop_tokens=stop_tokens,
        )

    def complete(
        self,
        step: int | None,
        prompts: Sequence[Prompt],
        samples: int,
        file: Path,
        should_stop: Callable[[], bool],
    ) -> tuple[list[Completion], Seconds]:
        """Return `samples` completions of each prompt, in order, for a step to train on, or for a
        validation (None). All validations use the same random numbers, so that differences reflect
        the weights. `file` may hold verdicts on the same texts. Raises Interrupted if
        `should_stop`, called before each verdict, returned True."""
        rows = [
            (place, prompt, sample)
            for place, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        numbers = (VALIDATION, 0) if step is None else (TRAINING, step)
        randomness = [(self._seed, *numbers, place, sample) for place, _, sample in rows]
        start = time.perf_counter()
        rollouts = self._sampler.sample(
            [prompt.tokens for _, prompt, _ in rows],
            randomness,
            self._request._replace(rows_per_prompt=math.gcd(samples, self._rows_per_device)),
        )
        texts = [self._text(rollout) for rollout in rollouts]
        sampled = time.perf_counter()
        verdicts = known_verdicts(file, rollouts) or verify(
            self._verifiers, [prompt for _, prompt, _ in rows], texts, should_stop
        )
        completions = [
            Completion.of(prompt, place, sample, text, rollout, verdict)
            for (place, prompt, sample), text, rollout, verdict in zip(
                rows, texts, rollouts, verdicts, strict=True
            )
        ]
        return completions, Seconds(sampled - start, time.perf_counter() - sampled)

    def _text(self, rollout: Rollout) -> str:
        tokens = rollout.tokens[:-1] if rollout.finished else rollout.tokens
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def longest_prompt(config: ReinforceRunConfig) -> int:
    """Return the maximum tokens of a prompt."""
    return config.sequence_length - config.train.max_new_tokens


def verify(
    verifiers: Sequence[Verifier],
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Verdict]:
    """Return the verdict on each text by its task's verifier, which only the first process asks.
    Raises Interrupted if `should_stop`, called before each text, returned True."""

    def ask() -> str:
        verdicts = []
        for prompt, text in zip(prompts, texts, strict=True):
            if should_stop():
                return ""
            verdict = verifiers[prompt.task](prompt.item, text)
            verdicts.append([verdict.rewards, verdict.status, verdict.message])
        return json.dumps(verdicts)

    answer = broadcast_from_first(ask)
    if not answer:
        raise Interrupted
    return [Verdict(*verdict) for verdict in json.loads(answer)]
