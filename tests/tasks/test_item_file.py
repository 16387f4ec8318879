"""Files of items: strict reading, one line per error, and the split."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.tasks.built_in_verifiers import BUILT_IN
from rungs.tasks.catalog import open_task
from rungs.tasks.item_file import ItemFile, _split, gold_text, read
from rungs.tasks.task import Item, Task

GOOD = '{"prompt": "2+2?", "answer": "4"}'


def write(path: Path, *items: dict[str, Any] | str) -> Path:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def items(count: int, **keys: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}?", "answer": str(number), **keys} for number in range(count)]


def open_file(folder: Path, **keys: Any) -> Task:
    return open_task(TaskConfig(**{"source": "items.jsonl", "verifier": "exact"} | keys), folder)


def test_a_file_of_items(tmp_path: Path) -> None:
    info = {"numbers": [1, 2], "target": 3}
    path = write(
        tmp_path / "items.jsonl",
        {"prompt": "a\u2028b", "answer": "1", "verifier": "exact"},
        "  ",
        {"prompt": "1 and 2", "answer": "1+2", "info": info, "verifier": "countdown"},
        "",
    )
    found = read(path, None)
    assert found.items == [
        Item("a\u2028b", "1", {}, "exact"),
        Item("1 and 2", "1+2", info, "countdown"),
    ]
    assert found.lines == {"a\u2028b": 1, "1 and 2": 3}
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p"}', ":2: answer: missing; this key is required"),
        ('{"prompt": "p", "answer": ""}', ':2: answer: "" is not allowed'),
        ('{"prompt": "p", "answer": 4}', ":2: answer: 4 is not allowed; must be of type string"),
        ('{"prompt": "p", "anser": "4"}', "did you mean answer?"),
        ('{"prompt": "p", "answer": "4", "verifier": "exakt"}', ':2: verifier: "exakt" is not'),
        ('{"prompt": "p", "answer": "4", "info": []}', ":2: info: [] is not allowed"),
        ('["p", "a"]', ":2: must hold a JSON object"),
        ("prompt,answer", ":2: malformed JSON at column 1"),
    ],
)
def test_each_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "items.jsonl", GOOD, line, GOOD)
    with pytest.raises(UserError) as caught:
        read(path, "exact")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "items.jsonl", text)
    with pytest.raises(UserError, match="has no items; each line must be"):
        read(path, "exact")


def test_an_item_needs_a_verifier(tmp_path: Path) -> None:
    path = write(tmp_path / "items.jsonl", GOOD)
    with pytest.raises(UserError, match=':1: add "verifier" to the task'):
        read(path, None)
    assert read(path, "reward.py").items[0].verifier is None


@pytest.mark.parametrize("name", ["countdown", "brackets", "parity", "sorted"])
def test_an_item_has_what_its_verifier_needs(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "items.jsonl", {"prompt": "p", "answer": "a", "verifier": name})
    with pytest.raises(UserError, match=rf":1: (info|answer): needs .*, for the verifier {name}$"):
        read(path, None)


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 12))
def test_a_split_shares_no_prompt_and_loses_none(numbers: list[int], count: int) -> None:
    source = read_numbers(numbers)
    prompts = {item.prompt for item in source.items}
    if len(prompts) <= count:
        with pytest.raises(UserError, match="leaves none to train on"):
            _split(source, count)
        return
    train, validation = _split(source, count)
    trained, held_out = {i.prompt for i in train}, [i.prompt for i in validation]
    assert len(set(held_out)) == len(held_out) == count
    assert not trained & set(held_out)
    assert trained | set(held_out) == prompts
    assert train == [item for item in source.items if item.prompt in trained]


def read_numbers(numbers: list[int]) -> ItemFile:
    found = [Item(f"{number}?", str(number)) for number in numbers]
    return ItemFile(Path("items.jsonl"), found, {}, "")


def test_what_is_held_out_does_not_depend_on_the_order(tmp_path: Path) -> None:
    write(tmp_path / "items.jsonl", *items(50))
    task = open_file(tmp_path, validation_items=10)
    write(tmp_path / "items.jsonl", *items(50)[::-1])
    again = open_file(tmp_path, validation_items=10)
    assert list(task.validation) == list(again.validation)
    one, other = ([each.train[n] for n in range(40)] for each in (task, again))
    assert one == other[::-1]
    assert task.sha256 != again.sha256


def test_two_files(tmp_path: Path) -> None:
    write(tmp_path / "items.jsonl", *items(10))
    write(
        tmp_path / "held-out.jsonl",
        *[item | {"prompt": "new " + item["prompt"]} for item in items(5)],
    )
    task = open_file(
        tmp_path, validation_source="held-out.jsonl", validation_items=3, train_items=4
    )
    assert [task.train[n].answer for n in range(len(task.train))] == ["0", "1", "2", "3"]
    assert [item.prompt for item in task.validation] == ["new 0?", "new 1?", "new 2?"]
    assert sorted(task.sha256) == ["held-out.jsonl", "items.jsonl"]


def test_shared_items_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "items.jsonl", *items(10))
    write(tmp_path / "held-out.jsonl", GOOD, *items(2))
    with pytest.raises(UserError) as caught:
        open_file(tmp_path, validation_source="held-out.jsonl")
    held_out, trained = f"{tmp_path}/held-out.jsonl:2", f"{tmp_path}/items.jsonl:1"
    assert (
        str(caught.value) == f"{held_out}: its prompt is also in {trained}; remove one of the two"
    )


@pytest.mark.parametrize(
    ("verifier", "answer", "text"),
    [("exact", "4", "4"), ("gsm8k", "4", "#### 4"), ("gsm8k", "2+2\n#### 4", "2+2\n#### 4")],
)
def test_right_texts(verifier: str, answer: str, text: str) -> None:
    item = Item("2+2?", answer, {}, verifier)
    assert gold_text(item) == text
    assert BUILT_IN[verifier].is_correct(item, text)
