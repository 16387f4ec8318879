"""Building datasets of preferences: TRL's formats, what counts, and which lines are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from rungs.cli import download_dataset
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.token_file import AnsweredDocuments

ASKED = {"role": "user", "content": "Who lit the lamp?"}
GOOD = {"role": "assistant", "content": "Nobody could say."}
BAD = {"role": "assistant", "content": "It's been lit."}
EXPLICIT = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
IMPLICIT = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
TEXTS = {"prompt": "Who lit", "chosen": " the lamp?", "rejected": " it?"}


def build(
    model: Path,
    *rows: Any,
    options: tuple[Any, ...] = (),
    files: Sequence[Path] = (),
    kind: str = "--preferences",
) -> Result:
    if not files:
        files = [model.parent / "prefs.jsonl"]
        files[0].write_text("\n".join(map(json.dumps, rows)) + "\n")
    place = ("--datasets-dir", model.parent / "datasets", "--validation-percent", 0)
    arguments = [kind, *files, "--name", "prefs", "--tokenizer", model, *place, *options]
    return CliRunner().invoke(download_dataset.main, [*map(str, arguments)])


def documents(model: Path) -> list[tuple[str, str]]:
    """Return the text and the counted text of each document."""
    folder = model.parent / "datasets" / "prefs"
    tokenizer, found = load_tokenizer(folder), AnsweredDocuments(folder / "train.safetensors")
    read = [found.read(number, number + 1)[:2] for number in range(len(found))]
    return [
        (tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[is_answer].tolist()))
        for tokens, is_answer in read
    ]


@pytest.mark.parametrize("row", [EXPLICIT, IMPLICIT, {**IMPLICIT, "prompt": ASKED["content"]}])
def test_a_chat_counts_after_the_prompt_only(model: Path, row: Any) -> None:
    result = build(model, row)
    assert result.exit_code == 0, result.output
    assert "2 answers" in result.output
    asked = "<|im_start|>user\nWho lit the lamp?<|im_end|>\n<|im_start|>assistant\n"
    answers = [f"{one['content']}<|im_end|>" for one in (GOOD, BAD)]
    assert documents(model) == [(asked + answer, answer) for answer in answers]
    split = Dataset("prefs", model.parent / "datasets" / "prefs").description.splits["train"]
    assert split.pairs
    assert split.pairs.is_preferences


def test_earlier_answers_of_the_prompt_do_not_count(model: Path) -> None:
    turns = [ASKED, BAD, ASKED]
    assert build(model, {**EXPLICIT, "prompt": turns}).exit_code == 0
    assert [counted for _, counted in documents(model)] == [
        "Nobody could say.<|im_end|>",
        "It's been lit.<|im_end|>",
    ]


@pytest.mark.parametrize("row", [TEXTS, {"chosen": "Who lit the lamp?", "rejected": "Who lit it?"}])
def test_texts_end_with_end_of_text(model: Path, row: Any) -> None:
    result = build(model, row)
    assert result.exit_code == 0, result.output
    counted = [" the lamp?<|im_end|>", " it?<|im_end|>"]
    assert documents(model) == [("Who lit" + answer, answer) for answer in counted]


@pytest.mark.parametrize("empty", ["chosen", "rejected"])
def test_an_empty_answer_ends_at_once(model: Path, empty: str) -> None:
    chat = {**EXPLICIT, empty: [{"role": "assistant", "content": ""}]}
    result = build(model, {**TEXTS, empty: ""}, chat)
    assert result.exit_code == 0, result.output
    found = documents(model)[0 if empty == "chosen" else 1 :: 2]
    assert [counted for _, counted in found] == ["<|im_end|>"] * 2
    assert found[0][0] == "Who lit<|im_end|>"
    assert found[1][0].startswith("<|im_start|>user\nWho lit the lamp?<|im_end|>")


def test_parquet_gives_the_same_documents(model: Path) -> None:
    file = model.parent / "prefs.parquet"
    pq.write_table(pa.Table.from_pylist([EXPLICIT, IMPLICIT]), file)
    assert build(model, files=[file]).exit_code == 0
    assert len(documents(model)) == 4
    assert documents(model)[:2] == documents(model)[2:]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**TEXTS, "rejected": b"\xff"}, "a preference must hold texts: Object of type bytes"),
        ({"prompt": "a", "chosen": "b"}, "line 1: rejected: missing"),
    ],
)
def test_errors_name_the_file_as_given(model: Path, row: Any, problem: str) -> None:
    file = model.parent / "prefs.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    result = build(model, files=[file])
    assert result.exit_code
    assert f"{file}: {problem}" in str(result.exception)


def test_equal_and_long_pairs_are_left_out(model: Path) -> None:
    long = {**EXPLICIT, "chosen": [{**GOOD, "content": "Nobody could say. " * 50}]}
    rows = EXPLICIT, long, {**EXPLICIT, "rejected": [GOOD]}
    result = build(model, *rows, options=("--max-tokens", 60))
    assert "1 preference of more than 60 tokens left out" in result.output
    assert len(documents(model)) == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected: missing"),
        ({**TEXTS, "rejected": [BAD]}, "rejected: must be a text"),
        ({**EXPLICIT, "chosen": [ASKED]}, "line 2: chosen: has no message from the assistant"),
        ({**EXPLICIT, "rejected": []}, "line 2: rejected: has no message from the assistant"),
        ({**TEXTS, "chosen": "", "rejected": ""}, "chosen and rejected: are empty"),
        (["prompt"], "must be"),
        ({"prompt": [], "chosen": [GOOD], "rejected": []}, "rejected: has no message"),
    ],
)
def test_other_lines_are_refused_by_number(model: Path, row: Any, problem: str) -> None:
    result = build(model, EXPLICIT, row)
    assert result.exit_code == 2 or result.exception is not None
    message = f"{result.output} {result.exception}"
    assert "line 2" in message
    assert problem in message
    assert not (model.parent / "datasets" / "prefs").exists()


def test_unpaired_preferences_are_answers_that_are_desirable_or_not(model: Path) -> None:
    rows = (
        {"prompt": [ASKED], "completion": [GOOD], "desirable": True},
        {"prompt": [ASKED], "completion": [BAD], "label": False},
        {"prompt": [ASKED], "completion": [GOOD, ASKED, BAD], "desirable": True},
    )
    result = build(model, *rows, kind="--unpaired")
    assert result.exit_code == 0, result.output
    assert "3 answers" in result.output
    found = documents(model)
    assert [counted for _, counted in found[:2]] == [
        "Nobody could say.<|im_end|>",
        "It's been lit.<|im_end|>",
    ]
    assert found[2][1] == found[0][1] + found[1][1]
    folder = model.parent / "datasets" / "prefs"
    file = AnsweredDocuments(folder / "train.safetensors")
    assert file.desirable_C is not None
    assert file.desirable_C.tolist() == [1, 0, 1]
    split = Dataset("prefs", folder).description.splits["train"]
    assert split.pairs
    assert split.pairs.preferences == "unpaired preferences"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([], "must be an object with prompt and completion"),
        ({"prompt": "a", "desirable": True}, "completion: missing"),
        ({"prompt": "a", "completion": [GOOD], "desirable": True}, "prompt: must be a list"),
        ({"prompt": "a", "completion": "b"}, "desirable: must be true or false"),
        ({"prompt": "a", "completion": "b", "desirable": 1}, "desirable: must be true or false"),
    ],
)
def test_what_is_no_unpaired_preference_is_refused(model: Path, row: Any, problem: str) -> None:
    result = build(model, row, kind="--unpaired")
    assert f"line 1: {problem}" in f"{result.output} {result.exception}"
