"""Configs that do not fit their datasets: every reason is reported, and the advice works."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from tests.support.token_datasets import (
    Pairs,
    configs,
    make_pairs,
    make_text,
    training_data,
)


def reported(datasets: dict[str, Dataset], **changes: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        TrainingData(configs(**changes), datasets)
    return str(caught.value).splitlines()


def pairs_with_prompts_of(place: Path, *lengths: int) -> dict[str, Dataset]:
    """A dataset of prompts of these lengths, each with an answer of one token and end of text."""
    pairs: Pairs = [([1] * length, [2]) for length in lengths]
    return {"p": make_pairs(place, "p", train=pairs)}


SINGLE = {"dataset": "p", "microbatch_size": 1, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("key", ["sequence_length", "context_length"])
def test_too_long_pairs_are_counted_and_the_advised_length_is_the_minimum(
    tmp_path: Path, key: str
) -> None:
    datasets = pairs_with_prompts_of(tmp_path, *[3] * 1990, 20, 7, 8, *[5] * 7, 19, 6)
    lengths = {"context_length": 100, key: 8}
    (line,) = reported(datasets, **SINGLE, **lengths)
    file = {"sequence_length": "train.json", "context_length": "model.json"}[key]
    assert line == (
        f"{file}: {key}: 8 is too short for 3 of the 2,002 pairs in the train split of dataset p"
        " (the longest has 22 tokens); raise it to 21 or remove them"
    )
    assert reported(datasets, **SINGLE, **{**lengths, key: 20})
    assert training_data(datasets, **SINGLE, **{**lengths, key: 21}).total_steps == 2002


def test_pairs_longer_than_the_context_can_only_be_removed(tmp_path: Path) -> None:
    datasets = pairs_with_prompts_of(tmp_path, 20)
    (line,) = reported(datasets, **SINGLE, sequence_length=8, context_length=20)
    assert line.endswith("(the longest has 22 tokens); remove them")


def test_too_long_validation_pairs_are_reported(tmp_path: Path) -> None:
    datasets = {"p": make_pairs(tmp_path, "p", train=[([1], [2])], validation=[([1] * 9, [2])])}
    assert "in the validation split of dataset p" in reported(datasets, **SINGLE)[0]
    with pytest.raises(UserError, match="1 of the 1 pairs in the validation split"):
        ValidationData.of(configs(**SINGLE), datasets)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target_offset": 0}, "target_offset: 0 is for text only; the train split .* need 1"),
        ({"start_train_token": 3}, "start_train_token: 3 is for text only; the train .* need 0"),
        ({"vocab_size": 29_999}, "too small for the token id 29999 in the train .* least 30000"),
        ({"microbatch_size": 4}, "there are 3 sequences of 8 tokens; at most 3 per step"),
    ],
)
def test_settings_that_do_not_fit_pairs_are_reported(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    datasets = pairs_with_prompts_of(tmp_path, 1, 2, 3)
    (message,) = reported(datasets, **{**SINGLE, **changes})
    assert re.search(line, message), message


ADVICE = [
    ({"min_train_tokens": 1000}, "min_train_tokens", r"1000 needs 21 steps of 48.* at most (\d+)"),
    ({"vocab_size": 900}, "vocab_size", r"token id 999 in the train split .* at least (\d+)"),
    ({"start_train_token": 10**6}, "start_train_token", r"has 1000 tokens; at most (\d+)"),
    ({"start_val_token": 100}, "start_val_token", r"has 100 tokens; at most (\d+)"),
    ({"context_length": 1000}, "context_length", r"has 1000 tokens; at most (\d+)"),
    (
        {"context_length": 2000, "sequence_length": 1000},
        "sequence_length",
        r"has 1000 tokens; at most (\d+)",
    ),
    ({"microbatch_size": 125}, "microbatch_size", r"at most (\d+) per step"),
]


@pytest.mark.parametrize(("changes", "key", "pattern"), ADVICE)
def test_the_advised_value_works_and_is_the_limit(
    tmp_path: Path, changes: dict[str, Any], key: str, pattern: str
) -> None:
    parts = {"train": np.arange(1000), "validation": np.arange(100)}
    if 1000 in (changes.get("context_length"), changes.get("sequence_length")):
        del parts["validation"]
    small = {"microbatch_size": 1, "gradient_accumulation_steps": 1}
    changes = changes if key == "min_train_tokens" else {**small, **changes}
    datasets = {"x": make_text(tmp_path, "x", **parts)}
    (line,) = reported(datasets, **changes)
    assert key in line
    match = re.search(pattern, line)
    assert match, line
    advised = int(match[1])
    assert training_data(datasets, **{**changes, key: advised}).total_steps
    beyond = advised - 1 if key == "vocab_size" else advised + 1
    assert reported(datasets, **{**changes, key: beyond})


def test_all_problems_are_reported_at_once(datasets: dict[str, Dataset]) -> None:
    lines = reported(
        datasets,
        dataset={"x": 1, "y": 2},
        vocab_size=500,
        start_val_token=60,
        min_train_tokens=10**6,
    )
    reasons = (
        *("id 999 in the train", "id 12999 in the train", "min_train_tokens: 1000000"),
        *("id 2099 in the validation", "id 17039 in the validation", "start_val_token: 60"),
    )
    for reason in reasons:
        assert sum(reason in line for line in lines) == 1
    assert len(lines) == len(reasons)


def test_validation_data_does_not_check_the_training_split(datasets: dict[str, Dataset]) -> None:
    assert ValidationData.of(configs(min_train_tokens=10**6), datasets) is not None
    with pytest.raises(UserError, match="start_val_token"):
        ValidationData.of(configs(start_val_token=10**6), datasets)
