"""Datasets built from text: the ids of the full text, and no text shared between splits."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rungs.common.errors import UserError
from rungs.data.build import sections, text_dataset
from rungs.data.build.sections import TextSection, split_sections
from rungs.data.catalog import build_dataset
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset, read_description

TEXT = "".join(f"Line {i}: you and\n\n\tsome naïve 😀 text.\r\n" for i in range(3000))


def write(folder: Path, **texts: str | bytes) -> list[Path]:
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        paths.append(path)
    return paths


def build(
    tmp_path: Path, files: list[Path], vocab_size: int = 300, percent: float = 5, name: str = "mine"
) -> Dataset:
    build = partial(text_dataset.build, tokenizer=vocab_size, validation_percent=percent)
    return build_dataset(name, files, tmp_path / "datasets", build)


def read(section: TextSection) -> str:
    return "".join(section.pieces(int))


def test_the_end_of_a_single_file_is_for_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "PIECE_BYTES", 4097)
    dataset = build(tmp_path, write(tmp_path, a=TEXT))
    tokenizer = load_tokenizer(dataset.folder)
    parts = [tokenizer.decode(dataset.tokens(split)[:]) for split in ("train", "validation")]
    assert all(part.endswith("\n<|endoftext|>") for part in parts)
    texts = [part.removesuffix("<|endoftext|>") for part in parts]
    assert "".join(texts) == TEXT
    assert len(texts[1].encode()) / len("".join(texts).encode()) == pytest.approx(0.05, abs=0.001)
    assert tokenizer.end_of_text is not None
    whole = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts]
    assert [list(dataset.tokens(split)[:]) for split in ("train", "validation")] == whole


def test_the_tokenizer_is_trained_on_the_training_text_only(tmp_path: Path) -> None:
    files = write(tmp_path, a="training " * 2000, b="zqzqzq " * 30)
    dataset = build(tmp_path, files, vocab_size=400)
    tokenizer = load_tokenizer(dataset.folder)
    assert len(tokenizer.encode(" training")) == 1
    assert len(tokenizer.encode(" zqzqzq")) == 7


def test_several_files_are_split_by_file(tmp_path: Path) -> None:
    files = write(tmp_path, **{f"f{i}": f"file {i} " * 100 for i in range(40)})
    dataset = build(tmp_path, files, percent=10)
    tokenizer = load_tokenizer(dataset.folder)
    documents = {
        split: tokenizer.decode(dataset.tokens(split)[:]).split("<|endoftext|>")[:-1]
        for split in dataset.splits
    }
    assert len(documents["train"]) == 36
    assert len(documents["validation"]) == 4
    assert sorted(documents["train"] + documents["validation"]) == sorted(
        path.read_text() for path in files
    )
    assert dataset.description.source.files == [path.name for path in files]


def test_the_smallest_of_few_files_is_for_validation(tmp_path: Path) -> None:
    paths = write(tmp_path, a="a" * 99, b="b" * 50, c="c" * 98, d="")
    parts = split_sections([TextSection.of_file(path) for path in paths], 5)
    assert [section.path.stem for section in parts["train"]] == ["a", "c"]
    assert [section.path.stem for section in parts["validation"]] == ["b"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", "é", "😀", "\n", "\r\n", "\r"]), min_size=1).map("".join),
    percent=st.floats(0, 99),
)
def test_splitting_a_text_loses_nothing(tmp_path: Path, text: str, percent: float) -> None:
    (path,) = write(tmp_path, a=text)
    first, last = TextSection.of_file(path).split(percent)
    assert first.end == last.start
    assert read(first) + read(last) == text


def test_a_large_text_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "PIECE_BYTES", 1000)
    monkeypatch.setattr(text_dataset, "_TRAINING_BYTES", 10_000)
    seen: list[str] = []
    monkeypatch.setattr(text_dataset, "train_bpe", lambda texts, _: seen.extend(texts))
    (path,) = write(tmp_path, a="".join(f"{i:99}\n" for i in range(1000)))
    text_dataset.train_tokenizer([TextSection.of_file(path)], 300)
    assert sum(map(len, seen)) == 10_000
    assert int(seen[-1].split()[0]) > 850


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ({"a": "text\n" * 10_000 + "\udcff"}, {}, "a.txt: not UTF-8 text, near byte 50000"),
        ({"a": ""}, {}, "no text for the train split"),
        ({"a": "x"}, {}, "no text for the validation split"),
        ({"a": TEXT}, {"vocab_size": 256}, "256 is too small; use at least 257"),
        ({"a": TEXT}, {"name": "owner/data"}, "choose another one, without /"),
        ({"a": TEXT}, {"name": "python-stdlib"}, "this name is reserved"),
        ({"a": TEXT}, {"name": "../up"}, "not a name"),
    ],
)
def test_errors_are_reported_and_nothing_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: dict[str, str],
    options: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setattr(sections, "PIECE_BYTES", 10_000)
    files = write(tmp_path, **{k: v.encode("utf-8", "surrogateescape") for k, v in texts.items()})
    with pytest.raises(UserError, match=message):
        build(tmp_path, files, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("datasets/[!.]*"))
    assert not list(tmp_path.glob("datasets/.*.partial"))


@pytest.mark.parametrize(
    ("name", "text", "warns"),
    [
        ("pairs.jsonl", '{"prompt": "a", "answer": "b"}\n' * 50, True),
        ("pairs", '\n{"prompt": "a", "answer": "b"}\n' * 50, True),
        ("list.json", "[\n" + '"a",\n' * 50 + '"b"\n]\n', True),
        ("notes.txt", "{This} is a text.\n" * 50, False),
        ("notes", "[1] This is a text.\n" * 50, False),
    ],
)
def test_json_as_text_is_reported(
    name: str, text: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    path.write_text(text)
    build(tmp_path, [path])
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == warns
    assert all(message.startswith(f"{path}: looks like JSON") for message in messages)


def test_a_taken_name_is_reported(tmp_path: Path) -> None:
    dataset = build(tmp_path, write(tmp_path, a=TEXT))
    before = read_description(dataset.folder)
    with pytest.raises(UserError, match="already exists; choose another name"):
        build(tmp_path, write(tmp_path, a=TEXT[:1000]))
    assert read_description(dataset.folder) == before
