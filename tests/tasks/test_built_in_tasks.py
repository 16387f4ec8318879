"""Every built-in task: worked answers, the split, and that items are the same everywhere."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungs.common.errors import UserError
from rungs.config.reinforce_config import SETTINGS, TaskConfig
from rungs.tasks.built_in_verifiers import BUILT_IN as VERIFIERS
from rungs.tasks.catalog import BUILT_IN, open_task
from rungs.tasks.task import ITEMS, Draws, Item, Task, TrainingItems, by_hash

HERE = Path()
TASKS = tuple(SETTINGS)
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "parity": [{}, {"min_bits": 1, "max_bits": 40}],
    "countdown": [{}, {"numbers": 6, "largest": 100, "largest_target": 999, "use_all": True}],
    "sort": [{}, {"min_digits": 1, "max_digits": 20}],
    "brackets": [{}, {"min_length": 1, "max_length": 40, "kinds": 4}],
    "add": [{}, {"min_digits": 1, "max_digits": 30}],
    "sums": [{}, {"products_percent": 100, "digits": 30}],
    "guess": [{}, {"largest": 1_000_000}],
}
CASES = [(name, values) for name, variants in VARIANTS.items() for values in variants]


def task_of(source: str, **keys: Any) -> Task:
    keys = {"validation_items": 8} | keys
    return open_task(TaskConfig(source=source, **keys), HERE)


def first(task: Task, count: int = 100) -> list[Item]:
    return [task.train[index] for index in range(count)]


@pytest.mark.parametrize(("name", "values"), CASES)
def test_right_answers_are_right_and_use_the_alphabet(name: str, values: dict[str, Any]) -> None:
    task = task_of(name, settings=values)
    verifier = VERIFIERS[task.verifier]
    for item in first(task, 100):
        assert verifier.problem(item) is None
        for text in (task.worked(item), task.short(item), item.answer):
            assert verifier.is_correct(item, text)
            assert not set(item.prompt + text) - set(task.alphabet or "")
        assert Item(**json.loads(json.dumps(asdict(item)))) == item
    assert task.alphabet is not None
    assert len(set(task.alphabet)) == len(task.alphabet)


def test_parity_by_the_definition() -> None:
    task = task_of("parity", settings={"max_bits": 40})
    lengths = set()
    for item in first(task, 300):
        bits = item.prompt.removesuffix(":")
        lengths.add(len(bits))
        odd = [sum(map(int, bits[: end + 1])) % 2 for end in range(len(bits))]
        assert task.worked(item) == f"{''.join(map(str, odd))}={odd[-1]}"
        assert task.short(item) == f"={odd[-1]}"
    assert lengths == set(range(4, 41))


def test_sort_by_the_definition() -> None:
    task = task_of("sort")
    assert task.worked(Item("302:", "023", {"digits": "302"})) == "032,23,3=023"
    for item in first(task):
        steps, _, answer = task.worked(item).partition("=")
        assert [step[0] for step in steps.split(",")] == list(answer) == sorted(item.prompt[:-1])


def test_add_by_the_definition() -> None:
    task = task_of("add", settings={"min_digits": 1, "max_digits": 6})
    for item in first(task):
        left, right = map(int, item.prompt.removesuffix(":").split("+"))
        columns, _, answer = task.worked(item).partition("=")
        assert int(answer) == left + right
        sums = re.findall(r"(\d)\+(\d)\+(\d)>(\d+)", columns)
        assert all(int(a) + int(b) + int(carry) == int(total) for a, b, carry, total in sums)
        digits = "".join(total[-1] for *_, total in sums[:-1]) + sums[-1][3][::-1]
        assert int(digits[::-1]) == int(answer)


def test_brackets_by_the_definition() -> None:
    task = task_of("brackets", settings={"kinds": 4})
    for item in first(task):
        text = item.prompt.removesuffix(":") + item.answer
        while text != (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", text)):
            text = shorter
        assert text == ""
        assert re.fullmatch(r"[)\]}>]+", item.answer)


def test_countdown_by_pythons_own_arithmetic() -> None:
    task = task_of("countdown", settings={"numbers": 4, "largest": 25})
    for item in first(task):
        numbers, target = item.prompt.removesuffix(":").split("=")
        used = sorted(map(int, re.findall(r"\d+", item.answer)))
        assert used == sorted(map(int, numbers.split(",")))
        assert eval(item.answer) == pytest.approx(int(target), rel=1e-12)
        assert 1 <= int(target) <= 99
        assert "()" not in item.answer


def test_sums_by_pythons_own_arithmetic() -> None:
    products = 0
    for item in first(task_of("sums"), 300):
        assert eval(item.prompt[:-1]) == int(item.answer)
        products += "*" in item.prompt
    assert 250 < products < 290


def test_guesses_fit_the_replies() -> None:
    task = task_of("guess")
    numbers = set()
    for item in first(task, 300):
        numbers.add(int(item.answer))
        left = set(range(1, 65))
        guesses = re.findall(r"(\d+)\?([<>]?)", task.worked(item))
        for guess, reply in guesses:
            assert int(guess) in left
            left = {n for n in left if n > int(guess)} if reply == ">" else left
            left = {n for n in left if n < int(guess)} if reply == "<" else left
        assert guesses[-1] == (item.answer, "")
    assert numbers == set(range(1, 65))


@pytest.mark.parametrize(("name", "values"), CASES)
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_training_and_validation_share_no_prompt(
    name: str, values: dict[str, Any], seed: int
) -> None:
    """Also not with those of another seed."""
    task = task_of(name, settings=values, seed=seed)
    other = task_of(name, settings=values, seed=seed // 2 + 1, validation_items=1)
    held_out = {item.prompt for item in task.validation}
    assert len(held_out) == 8
    for index in (*range(10), ITEMS - 1):
        assert not {task.train[index].prompt, other.train[index].prompt} & held_out


def test_a_small_task_is_split_without_repeats_or_shared_prompts() -> None:
    task = task_of("parity", settings={"min_bits": 7, "max_bits": 7}, validation_items=5)
    held_out = {item.prompt for item in task.validation}
    trained = {item.prompt for item in first(task, 3000)}
    assert len(held_out) == 5
    assert not held_out & trained
    assert len(trained) > 90


def test_a_task_with_too_few_prompts_is_refused() -> None:
    with pytest.raises(UserError, match=r"^parity: validation_items: 9 is more than the \d differ"):
        task_of("parity", settings={"min_bits": 6, "max_bits": 6}, validation_items=9)
    held_out = task_of("parity", validation_items=1).validation[0]
    with pytest.raises(UserError, match=r"^t: has too few different prompts"):
        TrainingItems("t", lambda _: held_out, by_hash, None)[0]


@pytest.mark.parametrize("name", TASKS)
def test_the_same_index_gives_the_same_item(name: str) -> None:
    task = task_of(name, seed=3, validation_items=1)
    again = task_of(name, seed=3, validation_items=1, train_items=8)
    assert first(task, 8) == first(again, 8)
    assert first(task, 8) != first(task_of(name, seed=4, validation_items=1), 8)
    assert len({item.prompt for item in first(task, 50)}) > 40


GOLDEN = {
    "parity": "4b49c6720264a270",
    "countdown": "b8b6008954766ad8",
    "sort": "7a14032c836336bc",
    "brackets": "b51b880e7138eb03",
    "add": "885c7badcf2f5ae9",
    "sums": "253be4298b6c2459",
    "guess": "5225a6eee5133718",
}
"""sha256 of the first items of each task: runs that were started must find the same ones."""


@pytest.mark.parametrize("name", TASKS)
def test_items_do_not_change_between_versions(name: str) -> None:
    task = task_of(name)
    items = [asdict(item) for item in [*first(task, 8), *task.validation]]
    digest = hashlib.sha256(json.dumps(items).encode()).hexdigest()
    assert digest[:16] == GOLDEN[name], "items changed: runs that were started cannot resume"


def test_every_task_of_the_config_is_there_with_its_verifier() -> None:
    assert tuple(BUILT_IN) == TASKS == tuple(VARIANTS)
    assert {task.verifier for task in BUILT_IN.values()} <= set(VERIFIERS)


@given(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(-5, 5), st.integers(0, 5))
def test_draws_are_within_their_limits(seed: int, number: int, least: int, more: int) -> None:
    draws = Draws(seed, number)
    assert least <= draws.between(least, least + more) <= least + more
    assert 10**more <= draws.number(more + 1, more + 1) < 10 ** (more + 1) or more == 0
    assert 0 <= draws.below(7) < 7
