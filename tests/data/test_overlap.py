"""Planted overlaps between validation and training are found, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.data import overlap
from rungs.data.overlap import (
    Examined,
    check,
    check_items,
    read_items,
    recorded,
    texts_of,
)
from rungs.data.text.tokenizer import train_bpe
from rungs.data.tokens.dataset import Dataset, Split
from rungs.data.tokens.token_file import PairWriter, TokenWriter

TOKENIZER = train_bpe(["some words of which Texts, are made. " * 50], 280)
RANDOM = np.random.default_rng(0)


def words(count: int) -> str:
    """Return words that no other text has."""
    return " ".join(f"w{number:x}" for number in RANDOM.integers(0, 1 << 60, count))


def write(folder: Path, split: Split, texts: list[str]) -> None:
    assert TOKENIZER.end_of_text is not None
    with TokenWriter(folder / f"{split}.safetensors", "U16") as writer:
        for text in texts:
            writer.append([*TOKENIZER.encode(text), TOKENIZER.end_of_text])


def make_dataset(folder: Path, train: list[str], validation: list[str]) -> Dataset:
    folder.mkdir()
    write(folder, "train", train)
    if validation:
        write(folder, "validation", validation)
    TOKENIZER.save(folder / "tokenizer.json")
    return Dataset("d", folder)


PASSAGE = words(13)
COPIES = [words(30) for _ in range(4)]
PASSAGES = [f"{words(9)} {PASSAGE} {words(4)}", words(20) + ". " + words(3) + " " + words(16)]
DISGUISED = PASSAGES[1].upper().replace(" ", ",  ", 20)
NEAR = [" ".join(PASSAGE.split()[:12]), " ".join(reversed(PASSAGE.split()))]


def test_planted_overlaps_are_found_and_nothing_else(tmp_path: Path) -> None:
    clean = [words(40) for _ in range(50)]
    validation = [*clean[:25], *COPIES, PASSAGES[0], DISGUISED, NEAR[0] + " " + words(5), NEAR[1]]
    train = [words(50) for _ in range(100)]
    train[10:10] = [*COPIES, f"{words(3)} {PASSAGE}", f"{words(30)} {PASSAGES[1]} {words(2)}"]
    found = check(make_dataset(tmp_path / "d", train, validation)).validation
    assert found is not None
    assert (found.texts, found.examined, found.copies) == (len(validation), len(validation), 4)
    assert found.overlapping == 4 + 2
    assert found.long_enough == len(validation)


@pytest.mark.parametrize("batch", [1, 40, 1 << 20])
def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(overlap, "_BATCH_HASHES", batch)
    examined = Examined([*COPIES, *NEAR, "short", PASSAGES[0]])
    examined.compare([words(30), COPIES[2], PASSAGE, "short", *(words(20) for _ in range(9))])
    found = examined.found()
    assert (found.copies, found.overlapping, found.long_enough) == (2, 2, 6)


def test_only_the_first_of_very_many_texts_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_MOST_HASHES", 100)
    examined = Examined(words(30) for _ in range(50))
    examined.compare([])
    assert examined.found().texts == 50
    assert examined.found().examined == 6  # of 18 runs and a text each


@pytest.mark.parametrize("block", [1, 7, 50, 1 << 20])
def test_texts_of_a_split_are_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(overlap, "_BLOCK_TOKENS", block)
    monkeypatch.setattr(overlap, "_BATCH_DOCUMENTS", 3)
    texts = ["one", "", "two words", "a longer text, of words", "four", "five", "six", "seven"]
    dataset = make_dataset(tmp_path / "d", texts, texts[-1:])
    assert list(texts_of(dataset, "train")) == [text for text in texts if text]
    with PairWriter(tmp_path / "d" / "train.safetensors", "U16") as writer:
        for text in texts[3:]:
            writer.append_pair(TOKENIZER.encode("Q "), TOKENIZER.encode(text))
    found = list(texts_of(Dataset("d", tmp_path / "d"), "train"))
    assert found == [f"Q {text}" for text in texts[3:]]


def test_the_record_counts_while_the_tokens_are_the_same(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d", [words(30)] * 4, [words(30)])
    assert recorded(dataset.folder) is None
    found = check(dataset)
    found.save(dataset.folder)
    assert recorded(dataset.folder) == found
    assert found.repeated_in_training == 0.75
    write(dataset.folder, "train", [words(30)])
    assert recorded(Dataset("d", dataset.folder).folder) is None


def test_without_ends_of_text_nothing_can_be_checked(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d", ["one"], [])
    (dataset.folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json with an end-of-text token"):
        check(dataset)


def test_items_with_lone_surrogates_are_looked_for(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d", ["a\ufffdb", words(30)], [])
    items = tmp_path / "items.jsonl"
    items.write_bytes(b'"a\\ud800b"\n["\xed\xb0\x80", {"x": "\\udfff"}]\n')
    found = check_items(dataset, read_items(items))
    assert (found.texts, found.copies) == (2, 1)


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("\n \n")
    with pytest.raises(UserError, match=r"items\.jsonl: has no items"):
        read_items(items)
