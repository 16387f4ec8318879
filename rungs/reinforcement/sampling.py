"""The prompts of steps and validations; their completions, turn by turn. Only the first process
asks environments and verifiers."""

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rungs.common.errors import UserError, errors_at, readable_line
from rungs.common.signals import Interrupted
from rungs.common.strict_json import format_value
from rungs.config.reinforce_config import ReinforceConfig, TaskConfig
from rungs.config.run_config import ReinforceRunConfig
from rungs.model.rollouts import Rollout, RolloutBatch, RolloutRequest, RolloutSampler
from rungs.parallel.processes import broadcast_from_first
from rungs.reinforcement.rollout_files import Completion, Prompt, Turn, read, read_known
from rungs.reinforcement.turn_format import ReplyTokens, TurnFormat
from rungs.tasks.environment import Environment, Episode, OwnEpisode
from rungs.tasks.task import Item, Task, Verdict

_LARGEST_SHUFFLED = 1 << 20
"""Larger tasks draw items at random instead of once per pass."""
_CHECKED_ITEMS = 1000
"""Prompts of each generated task that are tokenized before the run starts."""
_MOST_CHARACTERS = 10_000
"""Of a last reply, which only people read."""
TRAINING, VALIDATION = 0, 1
"""Part of the seed, so that steps and validations use different random numbers."""


class Prompts:
    """Draws prompts of at most `longest` tokens, which depend only on the config and the step."""

    def __init__(
        self,
        tasks: Sequence[Task],
        train: ReinforceConfig,
        formats: Sequence[TurnFormat],
        longest: int,
    ) -> None:
        self._tasks, self._train, self._formats = tasks, train, formats
        self._longest = longest

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
        place = f"task {self._tasks[task].name}: the prompt {format_value(item.prompt)}"
        with errors_at(f"{place}: "):
            tokens = self._formats[task].prompt(item)
        if not 0 < len(tokens) <= self._longest:
            raise UserError(
                f"{place} has {len(tokens) or 'no'} tokens; it must have 1 to {self._longest}"
                " (sequence_length − max_new_tokens)"
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


@dataclasses.dataclass
class _Rollout:
    """A completion in the making."""

    prompt: Prompt
    place: int
    sample: int
    known: Completion | None
    """The recorded one, whose replies count."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    episode: Episode | OwnEpisode | None = None
    unread: list[int] = dataclasses.field(default_factory=list)
    """Tokens of the reply after which the model goes on."""
    wrote: str = ""
    """Text of the turn."""
    is_cut: bool = False
    """Whether there is no room for more."""
    is_over: bool = False

    @property
    def turn_tokens(self) -> list[int]:
        """The tokens of the turn that has not been answered."""
        began = self.turns[-1].end + len(self.turns[-1].reply_tokens) if self.turns else 0
        return self.tokens[began:]

    def take(self, turn: Turn, limits: TaskConfig, room: int) -> None:
        """Add the answer to a turn, and its tokens if there are further turns."""
        self.turns.append(turn)
        is_last = turn.over or turn.status != "ok" or self.is_cut
        self.is_cut |= not is_last and len(self.turns) == limits.max_turns
        self.is_cut |= not is_last and len(self.tokens) + len(turn.reply_tokens) >= room
        self.is_over = is_last or self.is_cut
        if not self.is_over:
            self.unread = turn.reply_tokens
            self.tokens += self.unread
            self.log_probs += [0.0] * len(self.unread)

    def completion(self) -> Completion:
        """Return the completion when it is over."""
        failed = next((turn for turn in self.turns if turn.status != "ok"), None)
        rewards: dict[str, float] = {}
        for turn in self.turns:
            for name, reward in turn.rewards.items():
                rewards[name] = rewards[name] + reward if name in rewards else reward
        warned = failed or next((turn for turn in self.turns if turn.message), self.turns[-1])
        verdict = Verdict({} if failed else rewards, warned.status, warned.message)
        only_verified = len(self.turns) == 1 and not self.turns[0].reply
        return Completion(
            task=self.prompt.task,
            prompt=self.prompt.item.prompt,
            place=self.place,
            sample=self.sample,
            text="".join(turn.wrote + turn.reply for turn in self.turns),
            tokens=self.tokens,
            log_probs=self.log_probs,
            finished=not self.is_cut,
            answer=self.prompt.item.answer,
            rewards=verdict.rewards,
            correct=verdict.correct and verdict.status == "ok",
            status=verdict.status,
            message=verdict.message,
            turns=[] if only_verified else self.turns,
        )


_UNKNOWN = Turn("", 0, "", [], {}, True, "error", "has more turns than were recorded")


class CompletionSource:
    """Samples completions, whose turns their task's environment answers."""

    def __init__(
        self,
        config: ReinforceRunConfig,
        sampler: RolloutSampler,
        stop_tokens: tuple[int, ...],
        environments: Sequence[Environment],
        formats: Sequence[TurnFormat],
    ) -> None:
        size = config.train.sampling_batch_size or config.train.sequences_per_step
        self._rows_per_device = -(-size // sampler.devices)
        self._train, self._length = config.train, config.sequence_length
        self._sampler, self._stops = sampler, stop_tokens
        self._environments, self._formats = environments, formats
        turn_ends = {token for one in formats for token in one.turn_ends} - {*stop_tokens}
        self._request = RolloutRequest(
            batch_size=self._rows_per_device * sampler.devices,
            prompt_tokens=longest_prompt(config),
            new_tokens=config.train.max_new_tokens,
            temperature=config.train.temperature,
            stop_tokens=(*stop_tokens, *sorted(turn_ends)),
            has_turns=any(task.has_turns for task in config.train.tasks),
        )

    def complete(
        self,
        step: int | None,
        prompts: Sequence[Prompt],
        samples: int,
        file: Path,
        should_stop: Callable[[], bool],
        *,
        is_replay: bool = False,
    ) -> tuple[list[Completion], Seconds]:
        """Return `samples` completions of each prompt, in order, for a step to train on, or for a
        validation (None). All validations use the same random numbers, so that differences reflect
        the weights. `file` may hold the answers to the same texts; in a replay it holds those of
        environments and tools, which are not asked, and verifiers are asked anyway. Raises
        Interrupted if `should_stop`, called before each answer, returned True."""
        numbers = [self._train.seed, *((VALIDATION, 0) if step is None else (TRAINING, step))]
        has_turns = [task.has_turns for task in self._train.tasks]
        if is_replay:
            known = [one for one in read(file) if has_turns[one.task]] if any(has_turns) else []
        else:
            known = read_known(file)
        found, seconds = self._play(numbers, prompts, samples, known, should_stop)
        if known and not is_replay and [c.tokens for c in known] != [c.tokens for c in found]:
            found, seconds = self._play(numbers, prompts, samples, [], should_stop)
        return found, seconds

    def _play(
        self,
        numbers: list[int],
        prompts: Sequence[Prompt],
        samples: int,
        known: Sequence[Completion],
        should_stop: Callable[[], bool],
    ) -> tuple[list[Completion], Seconds]:
        """Return completions whose replies are those of `known` ones, if there are any."""
        recorded = {(one.place, one.sample): one for one in known}
        rollouts = [
            _Rollout(prompt, place, sample, recorded.get((place, sample)))
            for place, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        rows_per_prompt = math.gcd(samples, self._rows_per_device)
        request = self._request._replace(rows_per_prompt=rows_per_prompt)
        seconds = np.zeros(2)
        try:
            for at in range(0, len(rollouts), request.batch_size):
                rows = rollouts[at : at + request.batch_size]
                seconds += self._play_together(rows, numbers, request, should_stop)
        finally:
            for rollout in rollouts:
                if rollout.episode:
                    rollout.episode.close()
        return [rollout.completion() for rollout in rollouts], Seconds(*seconds.tolist())

    def _play_together(
        self,
        rollouts: Sequence[_Rollout],
        numbers: list[int],
        request: RolloutRequest,
        should_stop: Callable[[], bool],
    ) -> Seconds:
        """Play the rollouts of a batch to their end."""
        prompts = [rollout.prompt.tokens for rollout in rollouts]
        randomness = [(*numbers, rollout.place, rollout.sample) for rollout in rollouts]
        batch = RolloutBatch(self._sampler, prompts, randomness, request)
        going, sampling, answering = dict[int, _Rollout](), 0.0, 0.0
        while not all(rollout.is_over for rollout in rollouts):
            start = time.perf_counter()
            found = batch.write({row: rollout.unread for row, rollout in going.items()})
            ended = [rollouts[row] for row, new in found.items() if self._ends(rollouts[row], new)]
            sampled = time.perf_counter()
            for rollout, turn in zip(ended, self._answer(ended, numbers, should_stop), strict=True):
                limits = self._train.tasks[rollout.prompt.task]
                rollout.take(turn, limits, self._train.max_new_tokens)
            going = {row: rollouts[row] for row in found if not rollouts[row].is_over}
            sampling += sampled - start
            answering += time.perf_counter() - sampled
        return Seconds(sampling, answering)

    def _ends(self, rollout: _Rollout, new: Rollout) -> bool:
        """Add what the model wrote, and return whether the turn has ended."""
        rollout.unread = []
        rollout.tokens += new.tokens
        rollout.log_probs += new.log_probs.tolist()
        tokens, turn_format = rollout.turn_tokens, self._formats[rollout.prompt.task]
        is_stopped = tokens[-1] in self._stops
        rollout.wrote = turn_format.text(tokens[:-1] if is_stopped else tokens)
        has_ended = is_stopped or (new.finished and turn_format.ends(rollout.wrote))
        rollout.is_cut = not has_ended and len(rollout.tokens) == self._train.max_new_tokens
        return has_ended or rollout.is_cut

    def _answer(
        self, rollouts: Sequence[_Rollout], numbers: list[int], should_stop: Callable[[], bool]
    ) -> list[Turn]:
        """Return the answers to turns, as many at once as there are cores."""

        def ask_one(rollout: _Rollout) -> Turn | None:
            return None if should_stop() else self._answered(rollout, numbers)

        def ask() -> str:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                turns = [*pool.map(ask_one, rollouts)]
            if None in turns:
                return ""
            return json.dumps(turns, default=vars)

        answer = broadcast_from_first(ask)
        if not answer:
            raise Interrupted
        return [Turn(**turn) for turn in json.loads(answer)]

    def _answered(self, rollout: _Rollout, numbers: list[int]) -> Turn:
        """Return the recorded answer to a turn, or else the environment's."""
        if rollout.known:
            known = rollout.known.answered_turns
            return known[len(rollout.turns)] if len(rollout.turns) < len(known) else _UNKNOWN
        prompt, turn_format = rollout.prompt, self._formats[rollout.prompt.task]
        if rollout.episode is None:
            seed = seed_of(*numbers, rollout.place)
            rollout.episode = self._environments[prompt.task].begin(prompt.item, seed)
        return answered(rollout.episode, turn_format, rollout.wrote, len(rollout.tokens))


def seed_of(*numbers: int) -> int:
    """Return the seed of the environments of a group."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def answered(episode: Episode | OwnEpisode, turn_format: TurnFormat, wrote: str, end: int) -> Turn:
    """Return an episode's answer to a turn whose tokens end at `end`."""
    reply = episode.step(wrote, turn_format.calls)
    verdict, seen = reply.verdict, ReplyTokens([], "\n".join(reply.texts)[:_MOST_CHARACTERS], "")
    if reply.texts and not reply.over:
        try:
            seen = turn_format.reply(reply.texts)
        except UserError as error:
            problem = readable_line(f"the reply {seen.text!r}: {error}")
            verdict = Verdict(status="error", message=problem)
    message = "; ".join(filter(None, (verdict.message, seen.warning)))
    over = reply.over or verdict.status != "ok"
    return Turn(wrote, end, seen.text, seen.tokens, verdict.rewards, over, verdict.status, message)


def longest_prompt(config: ReinforceRunConfig) -> int:
    """Return the maximum tokens of a prompt."""
    return config.sequence_length - config.train.max_new_tokens
