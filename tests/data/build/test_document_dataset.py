"""Datasets from files of documents: what is in them, and the same bytes after kills."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.data import catalog
from rungs.data.build import document_dataset, document_files
from rungs.data.build.document_dataset import Progress, Request
from rungs.data.build.document_files import DataFile, fetch_ahead, local_files
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset
from tests.support.document_files import json_lines, texts

TOKENIZER = train_bpe(texts(200), 400)
PARTS = [[*texts(40, part), None, texts(1)[0]] for part in range(4)]


class Killed(BaseException):
    """Ends a build at once, as SIGKILL does but for the files that are open."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_dataset, "_BATCH_BYTES", 400)
    monkeypatch.setattr(document_dataset, "_SAVED_BATCHES", 2)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for number, part in enumerate(PARTS):
        path = tmp_path / f"part-{number}.jsonl"
        path.write_bytes(json_lines(*({"text": text} for text in part)))
        paths.append(path)
    return paths


def request(files: list[Path], **changes: Any) -> Request:
    chosen = local_files(files, "json lines")
    return Request(chosen, TOKENIZER, None, 20, None)._replace(**changes)


def build(name: str, request: Request, tmp_path: Path) -> Dataset:
    return catalog.build_documents_dataset(name, request, tmp_path / "datasets")


def documents_of(dataset: Dataset, split: Any, tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    ids = dataset.tokens(split)[:].tolist()
    assert ids[-1] == tokenizer.end_of_text
    return tokenizer.decode(ids).split("<|endoftext|>")[:-1]


def test_documents_are_in_order_and_some_held_out(files: list[Path], tmp_path: Path) -> None:
    dataset = build("d", request(files), tmp_path)
    all_texts = [text for part in PARTS for text in part if text]
    train, held_out = (documents_of(dataset, split) for split in ("train", "validation"))
    assert [text for text in all_texts if text in set(train)] == train
    assert [text for text in all_texts if text in set(held_out)] == held_out
    assert len(train) + len(held_out) == len(all_texts)
    assert not set(train) & set(held_out)  # the same text four times included
    assert 0.1 < len(held_out) / len(all_texts) < 0.3
    found = dataset.description.source.documents
    assert found is not None
    assert [file.documents for file in found.files] == [41] * 4
    assert found.rows_without_text == 4
    assert found.text_bytes == sum(len(text.encode()) for text in all_texts)
    assert {path.name for path in dataset.folder.iterdir()} == {
        *("train.safetensors", "validation.safetensors", "tokenizer.json", "dataset.json")
    }


def killed_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    remaining = calls

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        if remaining == 0:
            raise Killed
        remaining -= 1
        return function(*args, **kwargs)

    return counting


KILLS = {
    "while tokenizing": (document_dataset.BatchEncoder, "encode", [0, 1, 2, 5, 7]),
    "while saving": (Progress, "save", [0, 1, 3, 4]),
    "at the end": (document_dataset._Builder, "finish", [0]),
}


@pytest.mark.parametrize("vocabulary", [TOKENIZER, 320], ids=["given", "trained"])
@pytest.mark.parametrize("moment", KILLS)
def test_kills_change_no_byte(
    files: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    vocabulary: Tokenizer | int,
) -> None:
    asked = request(files, tokenizer=vocabulary)
    straight = build("straight", asked, tmp_path)
    place, name, calls = KILLS[moment]
    for count in calls:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, killed_after(count, getattr(place, name)))
            with pytest.raises(Killed):
                build("killed", asked, tmp_path)
        leave_unsaved_bytes(tmp_path / "datasets" / ".killed.partial")
    killed = build("killed", asked, tmp_path)
    for path in straight.folder.iterdir():
        assert (killed.folder / path.name).read_bytes() == path.read_bytes()


def leave_unsaved_bytes(folder: Path) -> None:
    """Add to the token files what may be there after a kill."""
    for path in folder.glob("*.safetensors"):
        with path.open("ab") as file:
            file.write(b"not counted yet")


def test_finished_files_are_not_read_again(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, opened, read = request(files), [], document_files.read
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "save", killed_after(7, Progress.save))
        with pytest.raises(Killed):
            build("d", asked, tmp_path)

    def logging_read(path: Path, *args: Any) -> Iterator[str | None]:
        opened.append((path.name, args[-1]))
        return read(path, *args)

    monkeypatch.setattr(document_files, "read", logging_read)
    build("d", asked, tmp_path)
    assert "part-0.jsonl" not in dict(opened)
    assert opened[0][1] > 0


def test_another_request_starts_over(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "save", killed_after(5, Progress.save))
        with pytest.raises(Killed):
            build("d", request(files), tmp_path)
    dataset = build("d", request(files[:1]), tmp_path)
    assert len(documents_of(dataset, "train")) + len(documents_of(dataset, "validation")) == 41


def test_a_finished_dataset_is_opened_or_refused(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("d", request(files), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(document_dataset, "build", pytest.fail)
        assert build("d", request(files), tmp_path).name == "d"
    with pytest.raises(UserError, match="already exists, built in another way; choose another"):
        build("d", request(files, max_bytes=100), tmp_path)


@pytest.mark.parametrize("most", [1, 700, 3000])
def test_max_bytes_end_with_a_document(files: list[Path], tmp_path: Path, most: int) -> None:
    asked = request(files, max_bytes=most, validation_percent=0)
    dataset = build("d", asked, tmp_path)
    sizes = np.cumsum([len(text.encode()) for part in PARTS for text in part if text])
    found = dataset.description.source.documents
    assert found is not None
    assert found.text_bytes == sizes[np.searchsorted(sizes, most)]
    assert dataset.splits == ("train",)


@pytest.mark.parametrize("vocabulary", [TOKENIZER, 260], ids=["given", "trained"])
def test_lone_surrogates_are_replaced(tmp_path: Path, vocabulary: Tokenizer | int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\\ud800b"}\n{"text": "\xed\xb0\x80 \\ud83d\\ude00"}\n')
    asked = request([path], tokenizer=vocabulary, validation_percent=0)
    dataset = build("d", asked, tmp_path)
    tokenizer = load_tokenizer(dataset.folder)
    assert documents_of(dataset, "train", tokenizer) == ["a\ufffdb", "\ufffd \U0001f600"]


def test_a_split_without_text_is_refused_and_nothing_left(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines({"text": ""}, {"text": None}))
    with pytest.raises(UserError, match="there is no text for the train split"):
        build("d", request([path]), tmp_path)
    path.write_bytes(json_lines({"text": "x"}))
    with pytest.raises(UserError, match="there is no text for the validation split"):
        build("d", request([path], validation_percent=0.001), tmp_path)
    assert list((tmp_path / "datasets").iterdir()) == []


def test_a_build_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n")
    with pytest.raises(UserError, match="line 1: malformed JSON"):
        build("d", request([path]), tmp_path)
    assert list((tmp_path / "datasets").iterdir()) == []


def test_the_next_files_are_fetched_while_one_is_read(files: list[Path]) -> None:
    started = [threading.Event() for _ in files]

    def fetch(file: DataFile) -> Path:
        started[files.index(Path(file.name))].set()
        return Path(file.name)

    found = fetch_ahead(request(files).files, fetch)
    assert next(found).path == files[0]
    assert all(event.wait(60) for event in started[1:3])
    assert [file.path for file in found] == files[1:]
