"""The verifier `math`, in the process that it runs in."""

import json
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.tasks import item_file
from rungs.tasks.checkup import check
from rungs.tasks.math_verifier import given_answer
from rungs.tasks.task import Item
from rungs.tasks.verifier import Verifier, open_verifier

ANSWERS = ["5/2", "\\frac{\\sqrt{2}}{2}", "x^2+1", "(2, 3)", "2\\times10^5", "$-7$", "\\text{no}"]


def write_items(folder: Path, answers: list[str], verifier: str = "math") -> TaskConfig:
    lines = [
        json.dumps({"prompt": f"{number}?", "answer": answer, "verifier": verifier})
        for number, answer in enumerate(answers)
    ]
    (folder / "items.jsonl").write_text("\n".join(lines))
    return TaskConfig(source="items.jsonl", validation_items=1)


def opened(folder: Path, config: TaskConfig) -> Verifier:
    task = item_file.open_task(config, folder)
    return open_verifier(config, task, folder, trust_verifier=False)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("5/2", ("\\boxed{\\frac{5}{2}}", "so $2.5$", "\\boxed{\\dfrac{10}{4}}"), "\\boxed{3/2}"),
        ("x^2+1", ("\\boxed{1+x^2}", "$1 + x \\cdot x$"), "\\boxed{y^2+1}"),
        ("(2, 3)", ("\\boxed{(2,3)}",), "\\boxed{(5, 3)}"),
        ("2\\times10^5", ("$200000$", "\\boxed{2 \\cdot 10^{5}}"), "$7\\times10^5$"),
        ("\\text{no}", ("\\boxed{\\text{no}}",), "\\boxed{\\text{on}}"),
        ("listen", (), "\\boxed{silent}"),
    ],
)
def test_expressions_are_compared_by_meaning(
    tmp_path: Path, answer: str, right: tuple[str, ...], wrong: str
) -> None:
    item = Item("?", answer, {}, "math")
    with opened(tmp_path, write_items(tmp_path, ANSWERS)) as verifier:
        assert [verifier(item, text).correct for text in right] == [True] * len(right)
        for text in (wrong, "", "2.5 without a box", "\\boxed{12:30}", "\\boxed{1/0}", "\\boxed{"):
            assert not verifier(item, text).correct


def test_the_checkup_passes(tmp_path: Path) -> None:
    config = write_items(tmp_path, ANSWERS)
    with opened(tmp_path, config) as verifier:
        assert check(verifier, item_file.open_task(config, tmp_path)).items == len(ANSWERS) - 1


@pytest.mark.parametrize(
    "answer",
    [
        "12:30",
        "3 1/2",
        "2 apples",
        "listen",
        "1.000.000",
        "1/0",
        "5 or 6",
        "$$",
        "101_{2}",
        "f'(x)",
    ],
)
def test_items_that_cannot_be_represented_are_refused(tmp_path: Path, answer: str) -> None:
    with pytest.raises(UserError, match=r"items\.jsonl:2: answer: is not one mathematical"):
        opened(tmp_path, write_items(tmp_path, ["1", answer, "2"]))


def test_other_verifiers_of_the_same_file_are_asked(tmp_path: Path) -> None:
    with opened(tmp_path, write_items(tmp_path, ANSWERS)) as verifier:
        assert verifier(Item("?", "7", {}, "last_number"), "It is 7.").correct


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("$1$ and $2$", "2"),
        ("\\boxed{3} = $4$", "3"),
        ("4", None),
        ("\\boxed{4", None),
    ],
)
def test_the_last_box_is_the_answer(completion: str, answer: str | None) -> None:
    assert given_answer(completion) == answer
