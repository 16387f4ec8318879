"""Shuffled documents and best-fit packing against plain lists, a naive packing and Grain's."""

import hashlib
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import pytest
from grain.experimental import BestFitPackIterDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from rungs.common.errors import UserError
from rungs.config.run_config import load_run
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData
from rungs.data.tokens.packing import best_fit
from rungs.data.tokens.sequences import IGNORED, TextWindows
from rungs.data.tokens.token_file import Texts, TokenWriter
from rungs.objectives.distillation import Teacher
from rungs.planning.forecast import _tokens
from tests.support.tiny_run import change_model, make_run
from tests.support.token_datasets import (
    END,
    A,
    B,
    S,
    configs,
    make_pairs,
    make_text,
    some_pairs,
    training_data,
    validation_rows,
)

EOT, BEGIN = 0, 1
SHUFFLED: dict[str, Any] = {"shuffle": "documents"}
PACKED: dict[str, Any] = {"documents": "separate", "packing": "best_fit"}
Rows = list[tuple[list[int], ...]]


class Corpus(NamedTuple):
    documents: list[list[int]]
    datasets: dict[str, Dataset]

    @property
    def tokens(self) -> list[int]:
        return [*itertools.chain(*self.documents)]


def write(place: Path, documents: list[list[int]], texts: Texts | None) -> dict[str, Dataset]:
    (place / "d").mkdir(parents=True)
    for split in ("train", "validation"):
        with TokenWriter(place / "d" / f"{split}.safetensors", "U16", texts) as writer:
            for document in documents:
                writer.append(document)
    return {"d": Dataset("d", place / "d")}


@pytest.fixture(params=[False, True], ids=["ends", "begins"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> Corpus:
    """Documents of different tokens, each with an end of text and perhaps a token to begin it."""
    monkeypatch.setattr("rungs.data.tokens.sequences._end_of_text", lambda _: EOT)
    monkeypatch.setattr("rungs.data.tokens.sequences._BLOCK_TOKENS", 50)
    lengths = np.random.default_rng(0).geometric(0.12, 70)
    ids = itertools.count(10)
    begin, texts = ([BEGIN], Texts(begin=[BEGIN], end=EOT)) if request.param else ([], None)
    documents = [[*begin, *itertools.islice(ids, int(length)), EOT] for length in lengths]
    return Corpus(documents, write(tmp_path, documents, texts))


def rows_of(data: TrainingData) -> Rows:
    """Return inputs, targets and, if documents are separate, starts of all sequences, in order."""
    batches = [data.batch(step) for step in range(data.total_steps)]
    return [
        tuple(array.reshape(-1, S)[row].tolist() for array in batch)
        for batch in ([a for a in batch if a is not None] for batch in batches)
        for row in range(A * B)
    ]


# Shuffled documents


def shuffled(documents: list[list[int]], key: str) -> list[list[int]]:
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    random = np.random.Philox(number).random_raw(len(documents)).tolist()
    return [document for _, document in sorted(zip(random, documents, strict=True))]


@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize(("start", "target_offset"), [(0, 1), (33, 1), (5, 0)])
def test_each_reading_has_whole_documents_in_an_order_of_its_own(
    corpus: Corpus, documents: Any, start: int, target_offset: int
) -> None:
    keys = {"start_train_token": start, "target_offset": target_offset, "documents": documents}
    data = training_data(corpus.datasets, dataset="d", epochs=3, seed=4, **SHUFFLED, **keys)
    left, rest = start, list[list[int]]()
    for document in corpus.documents:
        rest += [document[left:]] if left < len(document) else []
        left = max(left - len(document), 0)
    texts = corpus.datasets["d"].open("train").texts
    begin = corpus.datasets["d"].begin
    separator = (begin[0] if begin else EOT) if documents == "separate" else None
    expected: Rows = []
    for time in range(4):
        tokens: Any = np.array([*itertools.chain(*shuffled(rest, f"4 d {time}"))], np.uint16)
        windows = TextWindows(tokens, 0, S, target_offset, separator, texts)
        expected += [tuple(a.tolist() for a in windows[i]) for i in range(len(windows))]
    found = rows_of(data)
    assert data.total_steps == 3 * (((sum(map(len, rest)) - target_offset) // S) // (A * B))
    assert found == expected[: len(found)]


@pytest.mark.parametrize("keys", [SHUFFLED, PACKED | {"shuffle": True}])
def test_a_batch_depends_on_the_config_and_the_step_alone(
    corpus: Corpus, keys: dict[str, Any]
) -> None:
    """Whether a run is resumed or not, and however its devices share a microbatch."""
    keys = {"dataset": "d", "epochs": 2, **keys}
    whole = [*training_data(corpus.datasets, **keys).batches()]
    first = len(whole) // 2 + 1
    rest = [*training_data(corpus.datasets, **keys).batches(first, rows=np.array([1, 2]))]
    assert len(rest) == len(whole) - first > 1
    for found, expected in zip(rest, whole[first:], strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or np.array_equal(one, other[:, [1, 2]])  # type: ignore
    other_seed = training_data(corpus.datasets, **keys, seed=1)
    assert (other_seed.batch(0).inputs_ABS != whole[0].inputs_ABS).any()


def test_of_a_mixture_each_text_is_shuffled_on_its_own(corpus: Corpus) -> None:
    others = [[*(10_000 + token for token in document[:-1]), EOT] for document in corpus.documents]
    more = write(corpus.datasets["d"].folder / "more", others, None)["d"]
    datasets = {**corpus.datasets, "e": Dataset("e", more.folder)}
    alone = rows_of(training_data(datasets, dataset="e", epochs=2, **SHUFFLED))
    mixed = rows_of(training_data(datasets, dataset={"d": 1, "e": 1}, **SHUFFLED))
    of_e = [row for row in mixed if row in alone]
    assert of_e == alone[: len(of_e)]
    assert len(of_e) == pytest.approx(len(mixed) / 2, abs=1)


# Best fit


def naive_best_fit(sizes: list[int], length: int) -> list[int]:
    """Return how full each sequence is."""
    rows = list[int]()
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if row + size <= length]
        if fitting:
            rows.remove(max(fitting))
        rows.append(size + max(fitting, default=0))
    return sorted(rows)


def packed(sizes: list[int], length: int) -> list[list[int]]:
    order, firsts = best_fit(np.array(sizes, np.int64), length)
    assert firsts[0] == 0
    assert firsts[-1] == len(sizes)
    return [order[a:b].tolist() for a, b in itertools.pairwise(firsts.tolist())]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), max_size=60))
def test_each_piece_is_where_a_naive_search_puts_it(sizes: list[int]) -> None:
    rows = packed(sizes, 20)
    assert sorted(itertools.chain(*rows)) == [*range(len(sizes))]
    assert sorted(sum(sizes[piece] for piece in row) for row in rows) == naive_best_fit(sizes, 20)
    assert rows == sorted(map(sorted, rows))


def test_it_needs_no_more_sequences_than_grains() -> None:
    sizes = np.random.default_rng(1).integers(1, 65, 200).tolist()
    pieces = grain.MapDataset.range(200).map(lambda i: {"piece": np.full(sizes[i], i)})
    of_grain = BestFitPackIterDataset(
        pieces.to_iter_dataset(), length_struct={"piece": 64}, num_packing_bins=200
    )
    assert -(-sum(sizes) // 64) <= len(packed(sizes, 64)) <= len([*of_grain])


def pieces_of(row: tuple[list[int], ...]) -> list[tuple[list[int], list[int]]]:
    """Return inputs and targets of the documents in a packed sequence, without padding."""
    inputs, targets, starts = row
    firsts = [place for place in range(S) if starts[place] == place]
    found = [(inputs[a:b], targets[a:b]) for a, b in itertools.pairwise([*firsts, S])]
    is_padded = set(targets[firsts[-1] :]) == {IGNORED}
    return found[: len(found) - is_padded]


@pytest.mark.parametrize(("start", "target_offset"), [(0, 1), (33, 1), (0, 0)])
def test_documents_of_a_text_are_packed_whole_or_cut_at_full_sequences(
    corpus: Corpus, start: int, target_offset: int
) -> None:
    keys = {"start_train_token": start, "target_offset": target_offset, **PACKED}
    single = {"microbatch_size": B, "gradient_accumulation_steps": A, "dataset": "d"}
    data = training_data(corpus.datasets, **single, **keys)
    tokens, begin = corpus.tokens, corpus.datasets["d"].begin
    boundary = begin[0] if begin else EOT
    ends = [at for at in range(start + 1, len(tokens)) if tokens[at] == boundary]
    last = len(tokens) - target_offset
    expected = list[tuple[list[int], list[int]]]()
    for first, end in itertools.pairwise([start, *(e for e in ends if e < last), last]):
        for at in range(first, end, S):
            to = min(at + S, end)
            inputs, targets = tokens[at:to], tokens[at + target_offset : to + target_offset]
            if begin and target_offset:
                inputs = [BEGIN, *inputs[1:]]
                targets = [IGNORED if t == BEGIN else t for t in targets]
            expected.append((inputs, targets))
    sizes = [len(inputs) for inputs, _ in expected]
    rows = naive_best_fit(sizes, S)
    found = [piece for row in rows_of(data) for piece in pieces_of(row)]
    left_out = len(rows) - data.total_steps * A * B
    assert 0 <= left_out < A * B
    assert all(found.count(piece) <= expected.count(piece) for piece in found)
    assert sum(len(inputs) for inputs, _ in found) >= sum(rows[left_out:]) - S * left_out
    assert data.padding["d"] == pytest.approx(1 - sum(sizes) / (len(rows) * S))
    if not left_out:
        assert sorted(found) == sorted(expected)


def test_pairs_are_packed(tmp_path: Path) -> None:
    pairs = some_pairs(96, 0)
    datasets = {"p": make_pairs(tmp_path, "p", train=pairs, validation=pairs)}
    keys = {"dataset": "p", "microbatch_size": 1, "gradient_accumulation_steps": 1, **PACKED}
    data = training_data(datasets, **keys)
    found = list[int]()
    for step in range(data.total_steps):
        row = tuple(array.ravel().tolist() for array in data.batch(step) if array is not None)
        for inputs, targets in pieces_of(row):
            number = (inputs[-1] if inputs[-1] != END else inputs[0]) - 9000
            prompt, answer = pairs[number]
            tokens = [*prompt, *answer, END]
            ignored = [IGNORED] * max(len(prompt) - 1, 0)
            assert inputs == tokens[:-1]
            assert targets == [*ignored, *tokens[1 + len(ignored) :]]
            found.append(number)
    assert sorted(found) == [*range(96)]
    in_order = training_data(datasets, **keys | {"packing": "in_order"})
    assert data.padding["p"] < in_order.padding["p"]
    validation, expected = (
        validation_rows(ValidationData.of(configs(**keys | {"packing": packing}), datasets))
        for packing in ("best_fit", "in_order")
    )
    np.testing.assert_array_equal(validation, expected)


# What is refused, stored and shown


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (PACKED | {"documents": "joined"}, 'documents: "joined" does not go with packing "best_'),
        (PACKED | {"windows": "random"}, 'windows: "random" does not .*; use "consecutive"'),
        (PACKED | SHUFFLED, 'shuffle: "documents" does not .*; use true, which shuffles seq'),
        (
            {"max_minutes": 1.0, "group_schedules": {"head": "linear"}},
            "max_minutes: group_schedules need a known length; use max_steps",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        configs(**keys)


def test_pairs_have_no_documents_to_shuffle(datasets: dict[str, Dataset]) -> None:
    with pytest.raises(UserError, match=r'"documents" is for text only; .* pairs, which need true'):
        training_data(datasets, dataset="p", **SHUFFLED)


def test_documents_that_nothing_ends_are_not_shuffled(tmp_path: Path) -> None:
    dataset = make_text(tmp_path, "x", train=np.arange(100))
    with pytest.raises(UserError, match=r"^train.json: tokenizer: shuffled documents need the end"):
        training_data({"x": dataset}, **SHUFFLED, tokenizer=str(tmp_path))


def test_predictions_of_a_teacher_are_stored_for_one_order(corpus: Corpus) -> None:
    teacher = Teacher(None, "")  # type: ignore[arg-type]
    kinds = [{}, SHUFFLED, SHUFFLED | {"seed": 1}, {"documents": "separate"}, PACKED]
    folders = [
        teacher.store(config, TrainingData(config, corpus.datasets), Path())[0].folder
        for keys in kinds
        for config in [configs(dataset="d", **keys, teacher_top_k=2)]
    ]
    assert len(set(folders)) == len(kinds)


def test_the_plan_shows_the_padding(corpus: Corpus) -> None:
    run = make_run(corpus.datasets["d"].folder / "run", dataset="d", min_train_tokens=-1, **PACKED)
    change_model(run, vocab_size=1000)
    tokens = _tokens(run, load_run(run.path), corpus.datasets)
    assert 0 < tokens.padding["d"] < 0.1
