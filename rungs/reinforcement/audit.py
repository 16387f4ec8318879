"""Which texts a run rewards, to detect reward hacking: texts of its first and latest steps, by
length and frequency, and where reward and correctness disagree."""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rungs.common.errors import UserError
from rungs.common.shown_text import align_columns
from rungs.common.strict_json import format_value
from rungs.reinforcement.rollout_files import Completion, RolloutFiles, by_prompt, read
from rungs.run import folder, metrics

_STEPS = 20
"""Steps at the beginning and at the end; fewer if there are fewer."""
_Z = 1.96
"""A standard normal variable is within ± this with probability 95%."""
_BINS = 4
_EXAMPLES = 5
_RISE = 0.1
"""Reported if the reward rises by this much more than the share of correct texts."""
_LEFT_OUT = 0.01
"""Reported if more than this share of texts has no reward."""
_REPEATED = 0.5
"""Reported if one text is this share of all texts."""


class Part(NamedTuple):
    """The completions of some steps that have a reward."""

    steps: range
    completions: list[Completion]
    left_out: float = 0.0
    """Share of completions that have none."""

    def mean(self, value: Callable[[Completion], float]) -> float:
        """Return the mean of a value over completions."""
        return statistics.fmean(map(value, self.completions))

    def variance(self, value: Callable[[Completion], float]) -> float:
        """Return the variance of that mean; infinity for a single prompt. Prompts are the
        independent units, as completions of one prompt are alike."""
        groups = by_prompt(self.completions).values()
        means = [statistics.fmean(map(value, group)) for group in groups]
        return statistics.variance(means) / len(means) if len(means) > 1 else math.inf


class Change(NamedTuple):
    """Change of a mean."""

    size: float
    margin: float
    """Half of the 95% confidence interval; infinity if unknown."""

    @classmethod
    def of(cls, first: Part, last: Part, value: Callable[[Completion], float]) -> Self:
        variance = first.variance(value) + last.variance(value)
        return cls(last.mean(value) - first.mean(value), _Z * math.sqrt(variance))

    def __str__(self) -> str:
        margin = f"{self.margin:.2f}" if math.isfinite(self.margin) else "unknown"
        chance = ", which may be chance" if self.margin >= abs(self.size) > 0 else ""
        return f"{self.size:+.2f} (± {margin}{chance})"


def audit(run: folder.RunFolder) -> str:
    """Return the findings on a run's kept texts. Raises UserError if none or damaged."""
    # after --from there may be files of later steps from before
    steps = [step.global_step for step in metrics.stream(run.metrics, metrics.PolicyMetrics)]
    end = RolloutFiles(run.rollouts).step(steps[-1]) if steps else None
    paths = [p for p in sorted(run.rollouts.glob("step-*.jsonl")) if end is None or p <= end]
    if not paths:
        raise UserError(f"{run.rollouts}: no texts yet; take a few steps first")
    count = min(_STEPS, -(-len(paths) // 2))
    first, last = _part(paths[:count]), _part(paths[-count:])
    blocks = [
        [f"{run.path}: texts of steps {_span(first)} and {_span(last)}"],
        _table(first, last),
        ["reward by length, latest steps", *_by_length(last)],
        ["most frequent texts, latest steps", *_most_frequent(last)],
        ["best paid texts that are not correct, latest steps", *_paid_though_wrong(last)],
        list(_findings(first, last)) or ["Nothing looks suspicious."],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _part(paths: Sequence[Path]) -> Part:
    numbers = [int(path.stem.removeprefix("step-")) for path in paths]
    found = [completion for path in paths for completion in read(path)]
    rewarded = [completion for completion in found if completion.status == "ok"]
    if not rewarded:
        raise UserError(f"{paths[0]}: no text of it has a reward")
    steps, left_out = range(numbers[0], numbers[-1] + 1), 1 - len(rewarded) / len(found)
    return Part(steps, rewarded, left_out)


def _span(part: Part) -> str:
    return f"{part.steps.start:,} to {part.steps.stop - 1:,}"


_reward = operator.attrgetter("reward")
_is_correct = operator.attrgetter("correct")


def _reward_beyond(measure: Callable[[Completion], float]) -> Callable[[Completion], float]:
    return lambda completion: completion.reward - measure(completion)


def _ends_with_answer(completion: Completion) -> bool:
    return completion.written.strip().endswith(completion.answer)


def _has_answers(part: Part) -> bool:
    return any(completion.answer for completion in part.completions)


def _distinct(part: Part) -> float:
    """Return the share of distinct texts among those of each prompt."""
    groups = by_prompt(part.completions).values()
    return statistics.fmean(len({c.written for c in group}) / len(group) for group in groups)


def _table(first: Part, last: Part) -> list[str]:
    names = list(dict.fromkeys(name for c in last.completions for name in c.rewards))
    parts = {
        f"  reward {name}": lambda c, name=name: c.rewards.get(name, 0.0)
        for name in names
        if len(names) > 1
    }
    rows: dict[str, Callable[[Completion], float]] = {
        "reward": _reward,
        **parts,
        "correct, says the verifier": _is_correct,
        **({"ends with the answer": _ends_with_answer} if _has_answers(last) else {}),
        "tokens": lambda c: c.written_tokens,
        "cut off at max_new_tokens": lambda c: not c.finished,
    }
    cells = [
        [name, f"{first.mean(of):.3g}", f"{last.mean(of):.3g}", str(Change.of(first, last, of))]
        for name, of in rows.items()
    ]
    distinct = [f"{_distinct(part):.3g}" for part in (first, last)]
    cells.append(["different texts of a prompt", *distinct, ""])
    heads = ["", "first", "latest", "change (± 95% interval)"]
    return align_columns([heads, *cells], left=1).splitlines()


def _by_length(part: Part) -> list[str]:
    lengths = sorted({completion.written_tokens for completion in part.completions})
    size = -(-len(lengths) // _BINS)
    rows = [["tokens", "reward", "correct", "texts"]]
    for at in range(0, len(lengths), size):
        of_bin = lengths[at : at + size]
        found = Part(part.steps, [c for c in part.completions if c.written_tokens in of_bin])
        span, texts = f"{of_bin[0]} to {of_bin[-1]}", f"{len(found.completions):,}"
        rows.append([span, *_means(found), texts])
    return align_columns(rows, left=1).splitlines()


def _most_frequent(part: Part) -> list[str]:
    counts = Counter(completion.written for completion in part.completions)
    rows = [["text", "share", "reward", "correct"]]
    for text, count in counts.most_common(_EXAMPLES):
        same = Part(part.steps, [c for c in part.completions if c.written == text])
        share = f"{count / len(part.completions):.1%}"
        rows.append([format_value(text), share, *_means(same)])
    return align_columns(rows, left=1).splitlines()


def _means(part: Part) -> list[str]:
    return [f"{part.mean(of):.3g}" for of in (_reward, _is_correct)]


def _paid_though_wrong(part: Part) -> list[str]:
    wrong = {
        (c.prompt, c.written): c for c in part.completions if c.reward > 0 and not c.correct
    }.values()
    best = sorted(wrong, key=lambda completion: -completion.reward)[:_EXAMPLES]
    lines = [
        f"{c.reward:.3g} for {format_value(c.written)} to {format_value(c.prompt)}" for c in best
    ]
    return lines or ["none"]


def _findings(first: Part, last: Part) -> Iterator[str]:
    """Yield a line for each sign that the verifier rewards something other than right answers."""
    measures: dict[str, Callable[[Completion], float]] = {"are correct": _is_correct}
    if _has_answers(last):
        measures["end with the answer"] = _ends_with_answer
    for what, measure in measures.items():
        gap = Change.of(first, last, _reward_beyond(measure))
        if gap.size > _RISE:
            rise, gain = (Change.of(first, last, value) for value in (_reward, measure))
            yield (
                f"! The reward changed by {rise}, but the share of texts that {what} changed by"
                f" {gain}; the difference is {gap}: look at what is paid."
            )
            break
    if last.left_out > _LEFT_OUT:
        yield (
            f"! {last.left_out:.0%} of the latest texts are left out, as the verifier or"
            " environment failed on them: train.log says why."
        )
    text, count = Counter(c.written for c in last.completions).most_common(1)[0]
    share = count / len(last.completions)
    if share > _REPEATED and len({c.prompt for c in last.completions}) > 1:
        yield f"! {format_value(text)} is {share:.0%} of all texts, whatever the prompt."
    cut = Change.of(first, last, lambda c: not c.finished)
    if cut.size > _RISE:
        yield f"! The share of texts that are cut off at max_new_tokens changed by {cut}."
