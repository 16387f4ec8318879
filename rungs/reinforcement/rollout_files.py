"""`rollouts/`: every text that a run has sampled, with its rewards, in a file of JSON lines per
step. `samples.md` shows some: completions of a few held-out prompts at each checkpoint.

rollouts/
  step-000123.jsonl         the completions that step 123 trained on
  validation-000123.jsonl   those of the validation after step 123
  validation-start.jsonl    those of the validation before step 0"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rungs.common import disk, errors
from rungs.run.folder import RunFolder
from rungs.tasks.task import Item, Status, Verdict


class Prompt(NamedTuple):
    """An item of a task with its prompt's token ids."""

    task: int
    """Index in the config's `tasks`."""
    item: Item
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the model wrote in a turn, and the reply."""

    wrote: str
    end: int
    """Index in the completion's `tokens` after the last one of the turn."""
    reply: str
    reply_tokens: list[int]
    """Tokens of the reply with its template, which follow unless the completion ends here."""
    rewards: dict[str, float]
    over: bool
    """Whether the environment ended the completion."""
    status: Status
    message: str
    """What went wrong, or was odd about the reply."""

    @property
    def verdict(self) -> Verdict:
        """The environment's verdict on the turn."""
        return Verdict(self.rewards, self.status, self.message)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled text and its verdict."""

    task: int
    """Index in the config's `tasks`."""
    prompt: str
    place: int
    """Index of the prompt within the step or the validation."""
    sample: int
    """Index among the completions of the prompt."""
    text: str
    """With replies."""
    tokens: list[int]
    """Token ids, including a stop token, if any, and those of replies."""
    log_probs: list[float]
    """Log-probability with which each token was sampled, after the temperature, in nats; 0 for
    those of replies."""
    finished: bool
    """Whether it was not cut off at max_new_tokens or max_turns."""
    answer: str
    rewards: dict[str, float]
    """By name; empty if the verifier failed."""
    correct: bool
    status: Status
    """Outcome of the verifier."""
    message: str
    advantage: float | None = None
    """Of its first turn; None in a validation."""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    """Empty if only a verifier answered, after one turn."""

    @property
    def answered_turns(self) -> list[Turn]:
        """The turns, also of a completion with only one."""
        end, verdict = len(self.tokens), (self.rewards, True, self.status, self.message)
        return self.turns or [Turn(self.text, end, "", [], *verdict)]

    @property
    def is_written(self) -> np.ndarray:
        """Whether each token was written by the model, not by the environment."""
        places, written = np.arange(len(self.tokens)), np.ones(len(self.tokens), bool)
        for turn in self.turns:
            is_reply = (places >= turn.end) & (places < turn.end + len(turn.reply_tokens))
            written &= ~is_reply
        return written

    @property
    def turn_of(self) -> np.ndarray:
        """The index of each token's turn; of a reply's tokens that of the next one."""
        ends = [turn.end for turn in self.turns[:-1]]
        return np.searchsorted(ends, np.arange(len(self.tokens)), side="right")

    @property
    def written(self) -> str:
        """What the model wrote, a line for each turn, without replies."""
        return "\n".join(turn.wrote for turn in self.answered_turns)

    @property
    def written_tokens(self) -> int:
        """Number of tokens that the model wrote."""
        return int(self.is_written.sum())

    @property
    def verdict(self) -> Verdict:
        """The verifier's verdict."""
        return Verdict(self.rewards, self.status, self.message)

    @property
    def reward(self) -> float:
        """Sum of the rewards; NaN if the verifier failed."""
        return self.verdict.total if self.status == "ok" else float("nan")


_COMPLETION = TypeAdapter(Completion)


class RolloutFiles:
    """The files of a run in `rollouts/`, created on the first write. Only the first process
    `writes`."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self._folder, self._writes = folder, writes

    def step(self, step: int) -> Path:
        """The file of a step."""
        return self._folder / f"step-{step:06d}.jsonl"

    def validation(self, step: int | None) -> Path:
        """The file of the validation after a step; None: before step 0."""
        return self._folder / f"validation-{'start' if step is None else f'{step:06d}'}.jsonl"

    def validations(self, last: int) -> list[tuple[str, Path]]:
        """Return the validations up to that after step `last`, with names of their steps."""
        numbered = sorted(self._folder.glob("validation-[0-9]*.jsonl"))
        paths = [self.validation(None), *(p for p in numbered if p <= self.validation(last))]
        return [(path.stem.removeprefix("validation-"), path) for path in paths if path.is_file()]

    def write(self, path: Path, completions: Sequence[Completion]) -> None:
        """Write a file atomically; raises RunFailure."""
        if not self._writes:
            return
        lines = (json.dumps(one, ensure_ascii=False, default=vars) for one in completions)
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
        with disk.writing(path, "sampled texts", len(content)):
            path.parent.mkdir(exist_ok=True)
            disk.replace_file(path, content)


def read(path: Path) -> list[Completion]:
    """Return the completions in a file. Raises UserError if it is missing or damaged."""
    try:
        lines = path.read_bytes().splitlines()
        return [_COMPLETION.validate_json(line) for line in lines]
    except FileNotFoundError:
        raise errors.UserError(f"{path}: no such file") from None
    except (OSError, ValidationError):
        raise errors.UserError(f"{path}: damaged, or of another version of Rungs") from None


def read_known(path: Path) -> list[Completion]:
    """Return the completions in a file, none if it is missing or damaged. A step that a kill
    interrupted samples them again; as replies and timeouts need not be the same, the first ones
    count."""
    try:
        return read(path)
    except errors.UserError:
        return []


def array_of(completions: Sequence[Completion], field: str) -> np.ndarray:
    """Return a number per completion as an array."""
    return np.array([getattr(completion, field) for completion in completions])


PROMPTS = 6
"""How many held-out prompts are shown."""
_MOST_CHARACTERS = 400


def write_samples(run: RunFolder, files: RolloutFiles, last: int) -> None:
    """Rewrite the page with the validations up to the one after step `last`; raises RunFailure."""
    validations = [(name, by_prompt(read(path))) for name, path in files.validations(last)]
    if not validations:
        return
    lines = [
        "# Samples",
        "",
        "Completions of the first held-out prompts in each validation: the best and the worst of"
        " those sampled, by reward. Of several turns: what the model wrote, and what it saw.",
    ]
    for prompt in sorted(validations[0][1])[:PROMPTS]:
        lines += _section(prompt, validations)
    content = "\n".join(lines) + "\n"
    with disk.writing(run.samples, "samples.md", len(content)):
        disk.replace_file(run.samples, content)


def by_prompt(completions: Sequence[Completion]) -> dict[tuple[int, str], list[Completion]]:
    """Return the completions of each prompt, by its index and text."""
    groups: dict[tuple[int, str], list[Completion]] = {}
    for completion in completions:
        groups.setdefault((completion.place, completion.prompt), []).append(completion)
    return groups


def _section(
    prompt: tuple[int, str],
    validations: Sequence[tuple[str, dict[tuple[int, str], list[Completion]]]],
) -> list[str]:
    first = validations[0][1][prompt][0]
    lines = ["", f"## {_code(first.prompt)}", "", f"Answer: {_code(first.answer)}", ""]
    lines += ["| after step | correct | reward | best | worst |", "|---|---|---|---|---|"]
    for name, groups in validations:
        group = sorted(groups.get(prompt, []), key=lambda c: (c.status == "ok", c.verdict.total))
        if not group:
            continue
        correct = f"{sum(c.correct for c in group)} of {len(group)}"
        step = name if name == "start" else f"{int(name):,}"
        mean = sum(c.verdict.total for c in group) / len(group)
        best, worst = _turn_by_turn(group[-1]), _turn_by_turn(group[0])
        lines.append(f"| {step} | {correct} | {mean:.2f} | {best} | {worst} |")
    return lines


def _turn_by_turn(completion: Completion) -> str:
    """Return a completion for one cell of a Markdown table."""
    parts = [
        f"wrote {_code(t.wrote)}" + f", saw {_code(t.reply)}" * bool(t.reply)
        for t in completion.turns
    ] or [_code(completion.text)]
    if completion.status != "ok":
        parts.append(f"failed: {_code(completion.message)}")
    return ", ".join(parts)


def _code(text: str) -> str:
    """Return a text formatted for one cell of a Markdown table."""
    shown = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"
    escaped = shown.replace("\n", "⏎").replace("|", "\\|").replace("`", "ˋ")
    escaped = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in escaped)
    return f"`{escaped}`" if escaped.strip() else "(empty)"
