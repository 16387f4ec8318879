"""Which files of a repository are chosen, and what for."""

from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.data.build.document_files import Choice, choose, split_of

EVERYTHING = Choice()
CONFIGS: list[dict[str, Any]] = [
    {"config_name": "big", "data_files": [{"split": "train", "path": "big/*"}]},
    {
        "config_name": "small",
        "default": True,
        "data_files": [
            {"split": "train", "path": ["small/a.jsonl", "small/b.jsonl"]},
            {"split": "test", "path": "small/c*"},
        ],
    },
    {"config_name": "bare", "data_files": "small/c.jsonl"},
]
NAMES = ["big/a.parquet", "big/b.parquet", *(f"small/{letter}.jsonl" for letter in "abc")]


def chosen(
    names: list[str], choice: Choice = EVERYTHING, configs: list[dict[str, Any]] | None = None
) -> dict[str, str | None]:
    files: dict[str, tuple[int, str | None]] = dict.fromkeys(names, (1, None))
    return {file.name: file.split for file in choose(files, configs or [], choice)}


def test_names_say_the_split() -> None:
    names = ["data/train-00001.parquet", "data/validation-0.parquet", "README.md", "x.py"]
    assert chosen([*names, "data/test-0.parquet"]) == {
        "data/train-00001.parquet": "train",
        "data/validation-0.parquet": "validation",
    }
    assert chosen(["train/0.parquet", "test/0.parquet"]) == {
        "test/0.parquet": "validation",
        "train/0.parquet": "train",
    }


def test_without_a_split_to_validate_on_documents_are_held_out() -> None:
    assert chosen(["train.jsonl", "extra.jsonl"]) == {"train.jsonl": None}
    assert chosen(["b.jsonl", "a.txt.gz"]) == {"a.txt.gz": None, "b.jsonl": None}


def test_configurations_say_which_files() -> None:
    small = {"small/a.jsonl": "train", "small/b.jsonl": "train", "small/c.jsonl": "validation"}
    assert chosen(NAMES, configs=CONFIGS) == small
    assert chosen(NAMES, Choice("small"), CONFIGS) == small
    big = {"big/a.parquet": None, "big/b.parquet": None}
    assert chosen(NAMES, Choice("big"), CONFIGS) == big
    assert chosen(NAMES, Choice("bare"), CONFIGS) == {"small/c.jsonl": None}
    assert chosen(NAMES, configs=CONFIGS[:1]) == big


def test_patterns_and_splits_choose() -> None:
    assert chosen(NAMES, Choice(patterns=("*/a*", "small/b.*")), CONFIGS) == {
        "big/a.parquet": None,
        "small/a.jsonl": None,
        "small/b.jsonl": None,
    }
    assert chosen(NAMES, Choice(split="test"), CONFIGS) == {"small/c.jsonl": None}
    assert chosen(["train.txt", "val.txt"], Choice(split="validation")) == {"val.txt": None}


@pytest.mark.parametrize(
    ("names", "choice", "configs", "message"),
    [
        (["README.md"], Choice(), [], "no file of documents; these are known: .parquet, .jsonl"),
        (NAMES, Choice("huge"), CONFIGS, 'no configuration "huge"; there are big, small, bare'),
        (NAMES, Choice("huge"), [], 'no configuration "huge"; there are none'),
        (NAMES, Choice(), [CONFIGS[0], CONFIGS[2]], "choose a configuration .*; there are big, ba"),
        (NAMES, Choice(split="dev"), CONFIGS, 'no split "dev"; there are test, train'),
        (NAMES, Choice(patterns=("x*",)), [], r"matches --files x\*; the first is big/a.parquet"),
    ],
)
def test_a_choice_of_nothing_is_refused(
    names: list[str], choice: Choice, configs: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        chosen(names, choice, configs)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00001.parquet", "train"),
        ("valid.jsonl", "validation"),
        ("my_dev_set/0.txt", "validation"),
        ("testing.txt", "test"),
        ("contest.txt", ""),
        ("restrained.txt", ""),
    ],
)
def test_words_of_a_name_say_the_split(name: str, split: str) -> None:
    assert split_of(name) == split
