"""Sampled and verified completions of a step's prompts; the first process verifies for all."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rungs.common.signals import Interrupted
from rungs.config.run_config import ReinforceRunConfig
from rungs.data.tokenizer import Tokenizer
from rungs.model.rollouts import Rollout, RolloutRequest, RolloutSampler
from rungs.parallel.processes import broadcast_from_first
from rungs.reinforcement.prompts import Prompt
from rungs.reinforcement.rollout_files import Completion, known_verdicts
from rungs.tasks.verifiers.opening import Verifier
from rungs.tasks.verifiers.verdict import Verdict

TRAINING, VALIDATION = 0, 1
"""Part of the seed, so that steps and validations use different random numbers."""


class Seconds(NamedTuple):
    """Seconds per phase."""

    sampling: float
    verifying: float


class CompletionSource:
    """Samples completions and has them verified by their task's verifier. Stop tokens end texts.
    The config fixes the shapes."""

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
