"""Sequences: text windows equal plain slices of the tokens; pairs equal a token-by-token layout."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models

from rungs.common.errors import UserError
from rungs.data.text.tokenizer import Tokenizer, byte_level_tokenizer
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from rungs.data.tokens.sequences import TextWindows
from tests.support.token_datasets import (
    END,
    STEP_TOKENS,
    A,
    B,
    Pairs,
    S,
    configs,
    first_tokens,
    make_pairs,
    make_text,
    some_pairs,
    training_data,
    validation_rows,
)

# Text


@pytest.mark.parametrize("target_offset", [0, 1])
@pytest.mark.parametrize("start", [0, 5])
def test_steps_are_consecutive_windows_of_the_text(
    datasets: dict[str, Dataset], target_offset: int, start: int
) -> None:
    data = training_data(datasets, target_offset=target_offset, start_train_token=start)
    tokens = np.arange(1000)
    assert data.total_steps == (1000 - start - target_offset) // S // (A * B)
    for step in range(data.total_steps):
        first = start + step * STEP_TOKENS
        expected = tokens[first : first + STEP_TOKENS].reshape(A, B, S)
        inputs_ABS, targets_ABS, _ = data.batch(step)
        np.testing.assert_array_equal(inputs_ABS, expected)
        np.testing.assert_array_equal(targets_ABS, expected + target_offset)
        assert inputs_ABS.dtype == targets_ABS.dtype == np.int32


def test_the_last_token_is_a_target(datasets: dict[str, Dataset]) -> None:
    single = {"dataset": "z", "microbatch_size": 1, "gradient_accumulation_steps": 1}
    data = training_data(datasets, **single, context_length=399)  # of 400 tokens
    assert data.batch(0).targets_ABS[0, 0, -1] == 20_399
    assert training_data(datasets, **single, context_length=200).total_steps == 1
    assert training_data(datasets, **single, context_length=200, target_offset=0).total_steps == 2


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(
    tokens=st.integers(1, 90),
    length=st.integers(1, 9),
    batch=st.integers(1, 3),
    start=st.integers(0, 30),
    target_offset=st.integers(0, 1),
    min_train_tokens=st.just(-1) | st.integers(1, 60),
)
def test_any_sizes_give_windows_or_an_error(
    tmp_path: Path,
    tokens: int,
    length: int,
    batch: int,
    start: int,
    target_offset: int,
    min_train_tokens: int,
) -> None:
    dataset = make_text(tmp_path, str(tokens), train=np.arange(tokens))
    config = configs(
        dataset="d",
        context_length=length,
        microbatch_size=batch,
        gradient_accumulation_steps=1,
        start_train_token=start,
        target_offset=target_offset,
        min_train_tokens=min_train_tokens,
    )
    places = range(start, tokens - length - target_offset + 1, length)
    steps = len(places) // batch
    wanted = steps if min_train_tokens == -1 else -(-min_train_tokens // (batch * length))
    if not 0 < wanted <= steps:
        with pytest.raises(UserError, match="at most"):
            TrainingData(config, {"d": dataset})
        return
    data = TrainingData(config, {"d": dataset})
    assert data.total_steps == wanted
    assert first_tokens(data) == list(places)[: wanted * batch]


def test_sequence_length_overrides_context_length(datasets: dict[str, Dataset]) -> None:
    short = {"sequence_length": S, "context_length": 64, "validation_tokens": 33}
    config = configs(**short)
    data, expected = training_data(datasets, **short), training_data(datasets)
    assert data.total_steps == expected.total_steps
    assert data.total_tokens == data.total_steps * STEP_TOKENS
    for step in range(data.total_steps):
        np.testing.assert_array_equal(data.batch(step)[:2], expected.batch(step)[:2])
    validation = validation_rows(ValidationData.of(config, datasets))
    assert len(validation) == 5
    np.testing.assert_array_equal(
        validation, validation_rows(ValidationData.of(configs(validation_tokens=33), datasets))
    )


@given(st.lists(st.integers(0, 3), min_size=30, max_size=60))
def test_a_document_starts_with_each_separator(ids: list[int]) -> None:
    tokens: Any = np.array(ids, np.uint16)
    windows, length, separator = TextWindows(tokens, 1, 7, 1, separator=2), 7, 2
    for index in range(len(windows)):
        inputs_S, targets_S, starts_S = windows[index]
        np.testing.assert_array_equal(targets_S[:-1], inputs_S[1:])
        for place in range(length):
            before = [at for at in range(place + 1) if inputs_S[at] == separator]
            assert starts_S[place] == (before[-1] if before else 0)


def test_separate_documents_need_an_end_of_text(tmp_path: Path) -> None:
    dataset = make_text(tmp_path, "x", train=np.arange(100))
    byte_level_tokenizer(models.BPE()).save(str(dataset.folder / "tokenizer.json"))
    with pytest.raises(UserError, match="token of dataset x, but its tokenizer has none"):
        training_data({"x": dataset}, documents="separate")


def test_the_end_of_text_is_in_the_vocabulary(tmp_path: Path) -> None:
    dataset = make_text(tmp_path, "x", train=np.arange(100))
    (tmp_path / "other").mkdir()
    word_level = models.WordLevel({"<|endoftext|>": 1 << 20}, "")
    Tokenizer(tokenizers.Tokenizer(word_level)).save(tmp_path / "other" / "tokenizer.json")
    assert dataset.tokenizer_file is None
    with pytest.raises(UserError, match=r"^train.json: tokenizer: .* 1048576, beyond vocab_size"):
        training_data({"x": dataset}, documents="separate", tokenizer=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"^train.json: tokenizer: .* of dataset x: .* tokenizer"):
        training_data({"x": dataset}, documents="separate", tokenizer=str(tmp_path))


# Pairs


def inputs_and_targets(
    prompt: list[int], answer: list[int], length: int
) -> tuple[list[int], list[int]]:
    """Inputs and targets of a pair, token by token."""
    tokens = [*prompt, *answer, END]
    inputs, targets = [], []
    for place in range(length):
        inputs.append(tokens[place] if place < len(tokens) else END)
        following = place + 1
        counts = len(prompt) <= following < len(tokens)
        targets.append(tokens[following] if counts else -1)
    return inputs, targets


tokens_of_a_pair = st.lists(st.integers(0, 20), max_size=6)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15
)
@given(
    pairs=st.lists(
        st.tuples(tokens_of_a_pair, tokens_of_a_pair.filter(len)), min_size=1, max_size=12
    ),
    room=st.integers(0, 5),
    microbatch_size=st.integers(1, 3),
    shuffle=st.booleans(),
    epochs=st.integers(1, 2),
)
def test_only_answer_tokens_are_targets(
    tmp_path: Path, pairs: Pairs, room: int, microbatch_size: int, shuffle: bool, epochs: int
) -> None:
    length = max(len(prompt) + len(answer) for prompt, answer in pairs) + room
    dataset = make_pairs(tmp_path, "p", train=pairs, validation=pairs)
    batch_size = min(microbatch_size, len(pairs))
    config = configs(
        dataset="p",
        sequence_length=length,
        context_length=length + 3,
        microbatch_size=batch_size,
        gradient_accumulation_steps=1,
        shuffle=shuffle,
        epochs=epochs,
    )
    data = TrainingData(config, {"p": dataset})
    in_order = [inputs_and_targets(*pair, length) for pair in pairs]
    assert data.steps_per_epoch == len(pairs) // batch_size
    seen = []
    for step in range(data.total_steps):
        inputs_ABS, targets_ABS, _ = data.batch(step)
        assert inputs_ABS.dtype == targets_ABS.dtype == np.int32
        assert inputs_ABS.shape == targets_ABS.shape == (1, batch_size, length)
        seen += list(zip(inputs_ABS[0].tolist(), targets_ABS[0].tolist(), strict=True))
    used = data.steps_per_epoch * batch_size
    for epoch in range(epochs):
        of_epoch = seen[epoch * used : (epoch + 1) * used]
        assert sorted(of_epoch) == sorted(in_order[:used])
        assert shuffle or of_epoch == in_order[:used]
    validation = validation_rows(ValidationData.of(config, {"p": dataset}))
    assert [(inputs, targets) for inputs, targets in validation.tolist()] == in_order


def test_a_mixture_of_text_and_pairs_changes_neither(datasets: dict[str, Dataset]) -> None:
    data = training_data(datasets, dataset={"x": 1, "p": 2}, shuffle=True)
    pairs = {tuple(map(tuple, inputs_and_targets(*pair, S))) for pair in some_pairs(100, 0)}
    counts: Counter[str] = Counter()
    for inputs_ABS, targets_ABS, _ in data.batches():
        for row, targets in zip(inputs_ABS.reshape(-1, S), targets_ABS.reshape(-1, S), strict=True):
            if row[0] < 1000:
                np.testing.assert_array_equal(targets, row + 1)
                counts["x"] += 1
            else:
                assert (tuple(row.tolist()), tuple(targets.tolist())) in pairs
                counts["p"] += 1
    assert counts["p"] == pytest.approx(2 * counts["x"], abs=2)
