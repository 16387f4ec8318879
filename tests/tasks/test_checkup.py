"""The checkup passes every built-in task, and catches verifiers that can be tricked."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.config.reinforce_config import SETTINGS, TaskConfig
from rungs.tasks.built_in_verifiers import last_number
from rungs.tasks.catalog import open_task
from rungs.tasks.checkup import ITEMS, check
from rungs.tasks.task import Item, Task, Verdict
from rungs.tasks.verifier import open_verifier

HERE = Path()
ADD = open_task(TaskConfig(source="add"), HERE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("source", SETTINGS)
def test_every_built_in_task_passes(source: str, seed: int) -> None:
    config = TaskConfig(source=source, seed=seed)
    task = open_task(config, HERE)
    with open_verifier(config, task, HERE, trust_verifier=False) as verifier:
        checkup = check(verifier, task)
    assert checkup.items == ITEMS
    assert checkup.median_seconds > 0
    assert not any(checkup.paid.values())
    assert "another item's answer" in checkup.paid


def paying(rule: Callable[[Item, str], float]) -> Callable[[Item, str], Verdict]:
    return lambda item, text: Verdict({"reward": float(rule(item, text))})


def right(item: Item, text: str) -> bool:
    return last_number(text) == int(item.answer)


BAD = {
    "nothing": (lambda *_: 0, "pays 0 for the right answer"),
    "everything": (lambda *_: 1, 'pays 1 for an empty text, "", and 1 for the right'),
    "the empty text": (
        lambda item, text: not text or right(item, text),
        'pays 1 for an empty text, ""',
    ),
    "the prompt": (
        lambda item, text: text == item.prompt or right(item, text),
        "pays 1 for the prompt itself",
    ),
    "length": (lambda _, text: len(text), "pays 9 for the prompt itself"),
    "shortness": (lambda _, text: 1000 - len(text), "for an empty text"),
    "any number": (lambda _, text: any(map(str.isdigit, text)), "the prompt itself"),
    "any answer": (lambda _, text: text.startswith("="), "pays 1 for another item's answer"),
    "lists": (lambda item, text: item.answer in text, "pays 1 for a list of answers"),
    "lines": (
        lambda item, text: item.answer in text.splitlines() or right(item, text),
        "for lines of",
    ),
    "less than 1": (lambda item, text: right(item, text) / 2, "pays 0.5 for the right answer"),
    "a bit more": (
        lambda item, text: 1 + right(item, text),  # more for right ones, but all are correct
        "pays 1 for an empty text",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_verifier_that_can_be_tricked_is_refused_with_an_example(name: str) -> None:
    rule, message = BAD[name]
    with pytest.raises(UserError) as caught:
        check(paying(rule), ADD)
    assert str(caught.value).startswith("the verifier pays ")
    assert message in str(caught.value)
    assert '"783+8940:"' in str(caught.value)  # the first item
    assert "\n" not in str(caught.value)


def test_a_verdict_that_changes_is_refused() -> None:
    calls = itertools.count()
    with pytest.raises(
        UserError, match=r"the verifier pays 1 for the completion .*, and 1.00\d+ the"
    ):
        check(paying(lambda item, text: right(item, text) * (1 + next(calls) / 1000)), ADD)


def test_a_verifier_that_fails_is_refused_with_the_completion() -> None:
    def verify(item: Item, text: str) -> Verdict:
        if text:
            return Verdict.of(right(item, text))
        return Verdict(status="error", message="reward.py: line 3: ValueError: empty")

    with pytest.raises(UserError, match=r'^reward.py: line 3: ValueError: empty; .* completion ""'):
        check(verify, ADD)


def file_task(*answers: str) -> Task:
    items = [Item(f"{n}?", answer, {}, "exact") for n, answer in enumerate(answers)]
    return Task("file", items, items, "exact", lambda i: i.answer, lambda i: i.answer)


def test_right_by_accident_is_not_a_fault_but_told() -> None:
    task = file_task(*"aabcdefg")
    lenient = paying(lambda item, text: text == item.answer or (item.prompt == "3?" and not text))
    assert check(lenient, task).paid["an empty text"] == 1


@pytest.mark.parametrize("answers", ["a", "aaaa"])
def test_items_with_one_answer_can_be_checked(answers: str) -> None:
    paid = check(paying(lambda item, text: text == item.answer), file_task(*answers)).paid
    assert paid == {"an empty text": 0, "the prompt itself": 0}
