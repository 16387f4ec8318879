"""What begins and ends texts, by the files that a tokenizer was published with. The right answers
are those of transformers 5.23."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from rungs.common.errors import UserError
from rungs.data import catalog
from rungs.data.build import pair_dataset, text_dataset
from rungs.data.build.document_dataset import Request
from rungs.data.build.document_files import local_files
from rungs.data.provenance import notes_on_beginnings
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tokenizer_files import load_tokenizer, read_tokenizer_files
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.sequences import TextWindows
from rungs.data.tokens.token_file import Texts

NAMES = ["<|endoftext|>", "</s>", "<fin>", "<s>", "<|im_end|>"]
PLAIN, EOS, FIN, BOS, TURN = range(5)


def write(folder: Path, *, template: str = "$A", names: list[str] = NAMES, **files: Any) -> Path:
    """Write a tokenizer of single letters, and files beside it."""
    folder.mkdir(exist_ok=True)
    vocabulary = {name: i for i, name in enumerate([*names, "a", "b"])}
    raw = tokenizers.Tokenizer(models.WordLevel(vocabulary, "a"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(names)
    special = [(name, vocabulary[name]) for name in {*template.split()} - {"$A"}]
    raw.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    raw.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TOKEN = {"content": "<fin>", "lstrip": False, "special": True}


@pytest.mark.parametrize(
    ("files", "text", "answer"),
    [
        ({}, PLAIN, PLAIN),
        ({"tokenizer_config": {"eos_token": "</s>"}}, EOS, EOS),
        ({"tokenizer_config": {"eos_token": TOKEN}}, FIN, FIN),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": FIN}}, FIN, FIN),
        ({"tokenizer_config": {"eos_token": "absent"}}, PLAIN, PLAIN),
        ({"special_tokens_map": {"eos_token": TOKEN}}, FIN, FIN),
        (
            {
                "tokenizer_config": {"eos_token": "</s>"},
                "special_tokens_map": {"eos_token": "<fin>"},
            },
            FIN,
            FIN,
        ),
        (
            {
                "tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {}},
                "special_tokens_map": {"eos_token": "<fin>"},
            },
            EOS,
            EOS,
        ),
        ({"config": {"eos_token_id": [EOS, FIN]}}, EOS, EOS),
        ({"config": {"text_config": {"eos_token_id": EOS}}}, EOS, EOS),
        ({"generation_config": {"eos_token_id": FIN}}, FIN, FIN),
        ({"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": FIN}}, EOS, EOS),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, PLAIN, TURN),
    ],
)
def test_the_files_say_what_ends_a_text(
    files: dict[str, Any], text: int, answer: int, tmp_path: Path
) -> None:
    loaded = load_tokenizer(write(tmp_path, **files))
    assert (loaded.end_of_text, loaded.end_of_answer) == (text, answer)
    assert NAMES[answer] in loaded.describe_texts([])


def test_without_a_known_name_the_template_ends_texts(tmp_path: Path) -> None:
    loaded = load_tokenizer(write(tmp_path, names=["[SEP]", "[CLS]"], template="[CLS] $A [SEP]"))
    assert (loaded.begin, loaded.end_of_text) == ([1], 0)
    assert load_tokenizer(write(tmp_path, names=["[X]"])).end_of_text is None


@pytest.mark.parametrize("file", ["config", "generation_config", "tokenizer_config"])
@pytest.mark.parametrize("content", [[1], {"eos_token_id": "x"}, {"eos_token_id": [-1]}])
def test_a_damaged_file_is_named(file: str, content: Any, tmp_path: Path) -> None:
    if file == "tokenizer_config" and isinstance(content, dict):
        return
    with pytest.raises(UserError, match=rf"{file}\.json"):
        load_tokenizer(write(tmp_path, **{file: content}))


@pytest.mark.parametrize("template", ["$A </s>", "<s> $A </s>"])
def test_a_prompt_does_not_end_with_what_the_template_puts_after_texts(
    template: str, tmp_path: Path
) -> None:
    loaded = load_tokenizer(write(tmp_path, template=template))
    begin = [BOS] * template.startswith("<s>")
    assert loaded.encode_prompt("a b") == loaded.encode_beginning("a b") == [*begin, 5, 6]
    assert loaded.encode_prompt("a </s>") == [*begin, 5, EOS]
    assert loaded.encode_beginning("") == (begin or [PLAIN])


# Datasets

PUBLISHED: dict[str, Any] = {"template": "<s> $A", "tokenizer_config": {"eos_token": "<fin>"}}


def build(kind: str, tmp_path: Path, tokenizer: Tokenizer) -> Dataset:
    place, file = tmp_path / "datasets", tmp_path / f"{kind}.jsonl"
    rows = {
        "text": "a b\n",
        "pairs": '{"prompt": "a", "answer": "b"}\n',
        "jsonl": '{"text": "b"}\n' * 2,
    }
    file.write_text(rows[kind])
    if kind == "jsonl":
        asked = Request(local_files([file], "json lines"), tokenizer, None, 0, None)
        return catalog.build_documents_dataset(kind, asked, place)
    module = pair_dataset if kind == "pairs" else text_dataset
    build = partial(module.build, tokenizer=tokenizer, validation_percent=0)
    return catalog.build_dataset(kind, [file], place, build)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("text", [BOS, 5, 6, FIN]),
        ("pairs", [BOS, 5, 6, FIN]),
        ("jsonl", [BOS, 6, FIN, BOS, 6, FIN]),
    ],
)
def test_a_dataset_has_what_begins_and_ends_texts(
    kind: str, tokens: list[int], tmp_path: Path
) -> None:
    dataset = build(kind, tmp_path, load_tokenizer(write(tmp_path / "model", **PUBLISHED)))
    assert dataset.tokens("train")[:].tolist() == tokens
    assert dataset.open("train").texts == Texts(begin=[BOS], end=FIN)
    (dataset.folder / "dataset.json").unlink()
    again = load_tokenizer(dataset.folder)
    assert Dataset(kind, dataset.folder).begin == again.begin == [BOS]
    assert (again.end_of_text, again.end_of_answer) == (FIN, FIN)


def test_a_dataset_that_lacks_what_begins_texts_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model", **PUBLISHED))
    dataset = build("text", tmp_path, tokenizer)
    [note] = notes_on_beginnings({"x": dataset}, tokenizer)
    assert note == "x: each sequence begins with <s> (3), as its texts do"
    without = load_tokenizer(write(tmp_path / "other", tokenizer_config={"eos_token": "<fin>"}))
    old = build("jsonl", tmp_path, without)
    [note] = notes_on_beginnings({"x": old}, tokenizer)
    assert note.startswith("x: built without <s> (3), with which the tokenizer begins texts")
    assert notes_on_beginnings({"x": old}, without) == []


def test_answers_end_where_the_model_stops_and_documents_do_not(tmp_path: Path) -> None:
    chat = {"eos_token": "<|im_end|>"}
    tokenizer = load_tokenizer(write(tmp_path / "model", tokenizer_config=chat))
    assert build("pairs", tmp_path, tokenizer).tokens("train")[-1:].tolist() == [TURN]
    text = build("text", tmp_path, tokenizer)
    assert text.tokens("train")[:].tolist() == [5, 6, PLAIN]
    assert load_tokenizer(text.folder).end_of_answer == TURN


def test_documents_are_asked_for_with_what_begins_and_ends_them(tmp_path: Path) -> None:
    files = [tmp_path / "x.jsonl"]
    files[0].write_text("")
    checksums = set()
    for published in (PUBLISHED, PUBLISHED | {"template": "$A"}, {}):
        tokenizer = load_tokenizer(write(tmp_path / "model", **published))
        (tmp_path / "model" / "tokenizer_config.json").unlink(missing_ok=True)
        asked = Request(local_files(files, "json lines"), tokenizer, None, 0, None)
        checksums.add(asked.checksum)
    assert len(checksums) == 3


def test_a_copy_of_a_tokenizer_means_the_same(tmp_path: Path) -> None:
    for number, files in enumerate(({}, {"config": {"eos_token_id": FIN}}, PUBLISHED)):
        folder = write(tmp_path / str(number), **files)
        copy = tmp_path / f"copy-{number}"
        copy.mkdir()
        for name, content in read_tokenizer_files(folder / "tokenizer.json").items():
            (copy / name).write_bytes(content)
        assert load_tokenizer(copy).end_of_answer == load_tokenizer(folder).end_of_answer
        assert len([*copy.iterdir()]) == 1 + bool(files)


# Sequences


def test_each_sequence_begins_as_a_text() -> None:
    """The targets stay the same, but for the token that begins the next text."""
    tokens: Any = np.array([BOS, 5, 6, 5, FIN, BOS, 6, 6, FIN, BOS, 5], np.uint16)
    texts = Texts(begin=[BOS], end=FIN)
    windows = TextWindows(tokens, 0, 5, 1, separator=BOS, texts=texts)
    (first, targets, _), (second, following, starts) = (windows[0], windows[1])
    assert (first.tolist(), targets.tolist()) == ([BOS, 5, 6, 5, FIN], [5, 6, 5, FIN, -1])
    assert (second.tolist(), following.tolist()) == ([BOS, 6, 6, FIN, BOS], [6, 6, FIN, -1, 5])
    assert starts.tolist() == [0, 0, 0, 0, 4]
    windows = TextWindows(tokens, 1, 3, 1, texts=texts)
    assert [part.tolist() for part in windows[0]] == [[BOS, 6, 5], [6, 5, FIN]]
    same = TextWindows(tokens, 1, 3, 0, texts=texts)
    assert [part.tolist() for part in same[0]] == [[5, 6, 5]] * 2


def test_a_token_that_both_begins_and_ends_texts_is_a_target() -> None:
    tokens: Any = np.array([0, 5, 0, 0, 6, 0], np.uint16)
    windows = TextWindows(tokens, 0, 5, 1, texts=Texts(begin=[0], end=0))
    assert [part.tolist() for part in windows[0]] == [[0, 5, 0, 0, 6], [5, 0, -1, 6, 0]]


def test_several_tokens_that_begin_texts_are_no_targets() -> None:
    tokens: Any = np.arange(9, dtype=np.uint16)
    windows = TextWindows(tokens, 0, 4, 1, texts=Texts(begin=[7, 8]))
    assert [part.tolist() for part in windows[1]] == [[7, 8, 6, 7], [-1, 6, -1, 8]]
