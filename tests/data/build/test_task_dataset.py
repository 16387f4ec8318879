"""Datasets of pairs from the built-in tasks: their prompts, answers, bytes and tokenizer."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.data.build import task_dataset
from rungs.data.build.task_dataset import TASK_DATASETS, TaskPairs, character_tokenizer
from rungs.data.catalog import open_dataset
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset, Split
from rungs.tasks.catalog import BUILT_IN, open_task
from rungs.tasks.task import Task

COUNT = 400
"""Training pairs in these tests."""
ALPHABETS = {name: task.alphabet for name, task in BUILT_IN.items()}


@pytest.fixture(scope="module", autouse=True)
def few_pairs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_dataset, "TRAIN_PAIRS", COUNT)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the datasets, which are built by the first test that opens them."""
    return tmp_path_factory.mktemp("datasets")


@functools.cache
def task_of(name: str) -> Task:
    pairs = TASK_DATASETS[name]
    return open_task(TaskConfig(source=pairs.source, settings=dict(pairs.settings)), Path())


def texts(dataset: Dataset, split: Split) -> list[tuple[str, str]]:
    """Prompts and answers; each answer must be followed by one end of text."""
    tokenizer = load_tokenizer(dataset.folder)
    tokens, bounds = dataset.tokens(split)[:], dataset.open(split).bounds
    assert bounds is not None
    parts, start = [], 0
    for answer, end in bounds[:].tolist():
        assert tokens[end - 1] == tokenizer.end_of_text
        assert tokenizer.end_of_text not in tokens[start : end - 1]
        parts += [tokens[start:answer].tolist(), tokens[answer : end - 1].tolist()]
        start = end
    decoded = tokenizer.decode_batch(parts)
    return list(zip(decoded[::2], decoded[1::2], strict=True))


# Pairs


@pytest.mark.parametrize("name", [n for n, one in TASK_DATASETS.items() if not one.preferences])
def test_pairs_are_items_of_the_task_with_short_or_worked_answers(name: str, place: Path) -> None:
    dataset, task = open_dataset(name, place), task_of(name)
    items = {"train": task.train, "validation": task.validation}
    counts: dict[Split, int] = {"train": COUNT, "validation": task_dataset.VALIDATION_PAIRS}
    for split, count in counts.items():
        found = texts(dataset, split)
        assert len(found) == count
        for index, (prompt, answer) in enumerate(found):
            item = items[split][index]
            assert prompt == item.prompt
            assert answer in (task.short(item), task.worked(item))


def test_preferences_are_a_worked_and_a_short_answer_to_each_prompt(place: Path) -> None:
    name = "parity-preferences"
    dataset, task = open_dataset(name, place), task_of(name)
    found, pairs = texts(dataset, "train"), dataset.description.splits["train"].pairs
    assert pairs
    assert pairs.is_preferences
    assert len(found) == 2 * (TASK_DATASETS[name].preferences or 0)
    for index in range(0, len(found), 2):
        item = task.train[index // 2]
        assert found[index] == (item.prompt, task.worked(item))
        assert found[index + 1] == (item.prompt, task.short(item))


@pytest.mark.parametrize("name", TASK_DATASETS)
def test_no_held_out_prompt_is_trained_on(name: str, place: Path) -> None:
    dataset = open_dataset(name, place)
    train, held_out = ({prompt for prompt, _ in texts(dataset, s)} for s in ("train", "validation"))
    assert len(held_out) == task_dataset.VALIDATION_PAIRS
    assert not train & held_out


@pytest.mark.parametrize("percent", [20, 100])
def test_the_share_of_worked_answers(
    percent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASK_DATASETS, "parity-pairs", TaskPairs("parity", percent))
    answers = [answer for _, answer in texts(open_dataset("parity-pairs", tmp_path), "train")]
    worked = sum(not answer.startswith("=") for answer in answers) / COUNT
    deviation = (percent / 100 * (1 - percent / 100) / COUNT) ** 0.5
    assert worked == pytest.approx(percent / 100, abs=4 * deviation)


# Files


def test_the_bytes_are_the_same_twice(place: Path, tmp_path: Path) -> None:
    first, second = (open_dataset("parity-pairs", folder).folder for folder in (place, tmp_path))
    files = sorted(path.name for path in first.iterdir())
    assert {"train.safetensors", "validation.safetensors", "tokenizer.json"} <= {*files}
    assert files == sorted(path.name for path in second.iterdir())
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes()


# Tokenizer


@pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=list(ALPHABETS))
def test_every_character_is_one_token_and_comes_back(alphabet: str) -> None:
    tokenizer = character_tokenizer(alphabet)
    assert tokenizer.end_of_text == 0
    assert tokenizer.vocab_size == 1 + len(alphabet)
    assert tokenizer.encode(alphabet) == list(range(1, 1 + len(alphabet)))
    backwards = alphabet[::-1]
    assert tokenizer.decode(tokenizer.encode(backwards)) == backwards


@pytest.mark.parametrize(
    ("text", "unknown"),
    [("a", '"a"'), ("0110 :", '" "'), ("01\n", r'"\\n"'), ("éx:é", '"é" "x"'), ("😀", '"😀"')],
)
def test_an_unknown_character_is_named_and_not_the_end_of_text(text: str, unknown: str) -> None:
    with pytest.raises(UserError, match=f"^the tokenizer has no tokens for {unknown}$"):
        character_tokenizer(ALPHABETS["parity"]).encode(text)
