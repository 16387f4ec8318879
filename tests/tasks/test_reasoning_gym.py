"""Tasks of reasoning-gym, with the library where it is installed and with a small stand-in."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.tasks import reasoning_gym
from rungs.tasks.catalog import open_task
from rungs.tasks.checkup import check
from rungs.tasks.task import Task
from rungs.tasks.verifier import open_verifier

HERE = Path()
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs `uv run --extra reasoning`"
)


@dataclass
class StandInSettings:
    largest: int = 1000
    answers: bool = True
    seed: int | None = None
    size: int = 500


class StandIn:
    """Adds numbers; like the library's own, item `index` depends on `seed + index`."""

    numbers: list[int]
    """The seeds of all items that were asked for."""

    def __init__(self, config: StandInSettings) -> None:
        assert config.largest > 0, "largest must be positive"
        self._config = config
        StandIn.numbers = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < self._config.size
        number = (self._config.seed or 0) + index
        StandIn.numbers.append(number)
        chosen = Random(number)
        terms = tuple(chosen.randint(1, self._config.largest) for _ in range(2))
        answer = str(sum(terms)) if self._config.answers else None
        return {
            "question": f"{terms}?",
            "answer": answer,
            "metadata": {"terms": terms, "half": Fraction(1, 2)},
        }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(DATASETS={"sums": (StandIn, StandInSettings)})
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(factory=library))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", library)


def task_of(name: str, **keys: Any) -> Task:
    return open_task(TaskConfig(source=f"reasoning-gym:{name}", **keys), HERE)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_seeds_of_training_and_validation_are_apart(seed: int) -> None:
    task = task_of("sums", seed=seed, validation_items=20)
    held_out = set(StandIn.numbers)
    assert len(held_out) < 25
    StandIn.numbers.clear()
    prompts = [task.train[index].prompt for index in [*range(100), len(task.train) - 1]]
    trained = set(StandIn.numbers)
    assert min(held_out) > max(trained)
    assert max(held_out) < 2**32  # the largest seed of NumPy
    assert not {item.prompt for item in task.validation} & set(prompts)


@pytest.mark.usefixtures("stand_in")
def test_items_are_json_and_small_tasks_are_split_by_prompt() -> None:
    task = task_of("sums", settings={"largest": 15}, validation_items=10)
    item = task.train[0]
    assert item.info == {"terms": list(map(int, item.prompt[1:-2].split(","))), "half": "1/2"}
    held_out = {item.prompt for item in task.validation}
    assert len(held_out) == 10
    trained = {task.train[index].prompt for index in range(2000)}
    assert not trained & held_out
    assert len(trained | held_out) == 15**2


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "summs",
            {},
            'source: reasoning-gym has no task "summs"; did you mean reasoning-gym:sums?',
        ),
        ("sums", {"larges": 1}, "larges: unknown key; did you mean largest?"),
        ("sums", {"seed": 1}, "seed: unknown key; the keys are largest, answers"),
        ("sums", {"largest": 0}, "settings of reasoning-gym:sums: largest must be positive"),
        ("sums", {"answers": False}, "reasoning-gym:sums: has items without an answer (null)"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        task_of(name, settings=settings)
    assert message in str(caught.value)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"not installed .*; install it: uv sync --extra reasoning"):
        task_of("sums")


NAMES = ("countdown", "leg_counting", "number_sorting", "spell_backward", "prime_factorization")


@needs_library
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_librarys_tasks_pass_the_checkup(name: str) -> None:
    config = TaskConfig(source=f"reasoning-gym:{name}", validation_items=8)
    task = open_task(config, HERE)
    with open_verifier(config, task, HERE, trust_verifier=False) as verifier:
        assert verifier.name == reasoning_gym.VERIFIER
        assert check(verifier, task).items == 8
        for item in task.validation:
            assert verifier(item, item.answer).total == 1
            assert verifier(item, "").total < 1


@needs_library
def test_the_librarys_items_are_pure() -> None:
    def opened() -> Iterator[Task]:
        for name in NAMES:
            yield task_of(name, validation_items=4, seed=7)

    for task, again in zip(opened(), opened(), strict=True):
        assert [task.train[index] for index in range(5)] == [again.train[i] for i in range(5)]
        assert list(task.validation) == list(again.validation)
