"""Pairs and chats as sequences: every document once, whole, with its answers as targets."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.sequences import IGNORED, PackedDocuments, PaddedDocuments
from rungs.data.tokens.token_file import AnsweredDocuments, ChatWriter, PairWriter

Turn = tuple[list[int], list[int]]
LENGTH = 12

ids = st.integers(1, 50)
turns = st.tuples(st.lists(ids, min_size=1, max_size=3), st.lists(ids, min_size=1, max_size=3))
chats = st.lists(st.lists(turns, min_size=1, max_size=2), min_size=1, max_size=12)


def write(folder: Path, documents: list[list[Turn]], *, are_chats: bool) -> AnsweredDocuments:
    folder.mkdir(exist_ok=True)
    path = folder / "train.safetensors"
    if are_chats:
        with ChatWriter(path, "U16") as chat_writer:
            for document in documents:
                chat_writer.append_chat(document)
    else:
        with PairWriter(path, "U16") as pair_writer:
            for [pair] in documents:
                pair_writer.append_pair(*pair)
    return AnsweredDocuments(path)


def inputs_and_targets(document: list[Turn]) -> tuple[list[int], list[int]]:
    """Return the document's inputs and targets, written down without any arrays."""
    tokens, counted = list[int](), list[bool]()
    for prompt, answer in document:
        tokens += prompt + answer
        counted += [False] * len(prompt) + [True] * len(answer)
    targets = [t if c else IGNORED for t, c in zip(tokens, counted, strict=True)]
    return tokens[:-1], targets[1:]


def in_packs(documents: list[list[Turn]]) -> list[list[list[Turn]]]:
    """Return the documents by sequence: each sequence takes documents while they fit."""
    packs: list[list[list[Turn]]] = []
    room = 0
    for document in documents:
        size = len(inputs_and_targets(document)[0])
        if size > room:
            packs.append([])
            room = LENGTH
        packs[-1].append(document)
        room -= size
    return packs


@settings(max_examples=30)
@given(documents=chats, are_chats=st.booleans())
def test_every_document_is_packed_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[Turn]], are_chats: bool
) -> None:
    if not are_chats:
        documents = [[turn] for document in documents for turn in document]
    folder = tmp_path_factory.mktemp("d")
    packed = PackedDocuments(write(folder, documents, are_chats=are_chats), LENGTH)
    packs = in_packs(documents)
    assert len(packed) == len(packs)
    for index, pack in enumerate(packs):
        inputs_S, targets_S, starts_S = (array.tolist() for array in packed[index])
        place = 0
        for document in pack:
            inputs, targets = inputs_and_targets(document)
            end = place + len(inputs)
            assert inputs_S[place:end] == inputs
            assert targets_S[place:end] == targets
            assert starts_S[place:end] == [place] * len(inputs)
            place = end
        assert targets_S[place:] == [IGNORED] * (LENGTH - place)
        assert starts_S[place:] == [place] * (LENGTH - place)


@settings(max_examples=20)
@given(documents=chats)
def test_padded_chats_are_the_same_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[Turn]]
) -> None:
    padded = PaddedDocuments(write(tmp_path_factory.mktemp("d"), documents, are_chats=True), LENGTH)
    assert len(padded) == len(documents)
    for index, document in enumerate(documents):
        inputs_S, targets_S = padded[index]
        inputs, targets = inputs_and_targets(document)
        assert inputs_S[: len(inputs)].tolist() == inputs
        assert targets_S.tolist() == targets + [IGNORED] * (LENGTH - len(targets))


def test_a_dataset_of_chats_describes_itself(tmp_path: Path) -> None:
    two_turns: list[Turn] = [([1, 2], [3]), ([4], [5, 6, 7])]
    write(tmp_path / "d", [two_turns, [([8], [9])]], are_chats=True)
    description = Dataset("d", tmp_path / "d").description.splits["train"]
    assert description.tokens == 9
    assert description.pairs is not None
    assert description.pairs.model_dump(exclude_none=True) == {
        "pairs": 2,
        "longest_tokens": 7,
        "answer_tokens": 5,
        "is_chats": True,
    }
