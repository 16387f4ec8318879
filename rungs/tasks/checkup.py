"""Checks a verifier before training, as a model learns to exploit anything it rewards. Rewarded
empty completions and lists of guesses have been reported (Liuziyu77/Visual-RFT issues 176, 79)."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from rungs.common.errors import UserError
from rungs.common.strict_json import format_value as quoted
from rungs.tasks.task import Item, Task, Verdict

ITEMS = 8
Verify = Callable[[Item, str], Verdict]


class Checkup(NamedTuple):
    """Findings about a verifier that passed."""

    items: int
    median_seconds: float
    """Median duration of a call."""
    paid: dict[str, int]
    """For each kind of wrong text, for how many items it was rewarded, by accident."""


def check(verify: Verify, task: Task) -> Checkup:
    """Call a verifier on a few training items and return the findings.

    A wrong text, such as another item's answer, may be right by accident, but not for half of the
    items. Raises UserError if the verifier fails; doesn't count the right answer as correct;
    rewards or counts as correct an empty text, the prompt, another item's answer or a list of
    answers like the right one; or gives another reward the second time."""
    items = [task.train[index] for index in range(min(ITEMS, len(task.train)))]
    seconds: list[float] = []

    def verdict_on(item: Item, text: str) -> Verdict:
        start = time.perf_counter()
        verdict = verify(item, text)
        seconds.append(time.perf_counter() - start)
        if verdict.status != "ok":
            raise UserError(
                f"{verdict.message}; this was for the completion {quoted(text)} of"
                f" {quoted(item.prompt)}: a verifier must return a reward for any text"
            )
        return verdict

    examples: dict[str, list[str]] = {}
    for item in items:
        right, best = _best_right(verdict_on, item, task)
        for kind, text in _wrong_texts(item, items, task).items():
            found, verdict = examples.setdefault(kind, []), verdict_on(item, text)
            if verdict.total >= best.total or verdict.correct:
                found.append(
                    f"pays {verdict.total:g} for {kind}, {quoted(text)}, and {best.total:g} for the"
                    f" right answer {quoted(right)} to {quoted(item.prompt)}"
                )
    for found in examples.values():
        if 2 * len(found) >= len(items):
            raise UserError(f"the verifier {found[0]}; a model would learn that instead")
    paid = {kind: len(found) for kind, found in examples.items()}
    return Checkup(len(items), statistics.median(seconds), paid)


def _best_right(verify: Verify, item: Item, task: Task) -> tuple[str, Verdict]:
    """Return the right text with the highest reward, worked or short, and its verdict."""
    verdicts: dict[str, Verdict] = {}
    for text in (task.worked(item), task.short(item)):
        verdicts[text], second = verify(item, text), verify(item, text)
        if verdicts[text] != second:
            raise UserError(
                f"the verifier pays {verdicts[text].total:g} for the completion {quoted(text)} of"
                f" {quoted(item.prompt)}, and {second.total:g} the second time; it must depend on"
                " its arguments only"
            )
    text, best = max(verdicts.items(), key=lambda pair: pair[1].total)
    if not best.correct:
        raise UserError(
            f"the verifier pays {best.total:g} for the right answer {quoted(text)} to"
            f" {quoted(item.prompt)}; it needs a total of at least 1, or a reward correct of 1"
        )
    return text, best


def _wrong_texts(item: Item, items: list[Item], task: Task) -> dict[str, str]:
    """Return texts that should not be rewarded, by kind."""
    texts = {"an empty text": "", "the prompt itself": item.prompt}
    others = [other for other in items if other.answer != item.answer]
    if not others:
        return texts
    texts["another item's answer"] = task.short(others[0])
    for name, form in {"": lambda other: other.answer, "full ": task.short}.items():
        texts[f"a list of {name}answers"] = ", ".join(_surrounded(item, others, form))
        texts[f"lines of {name}answers"] = "\n".join(_surrounded(item, others, form))
    return texts


def _surrounded(item: Item, others: list[Item], form: Callable[[Item], str]) -> list[str]:
    """Return answers with the right one in the middle, as the first or last may count."""
    wrong = list(dict.fromkeys(map(form, others)))
    half = len(wrong) // 2
    return [*wrong[:half], wrong[-1], form(item), *wrong[half:]]
