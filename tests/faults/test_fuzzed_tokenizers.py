"""Whatever a tokenizer's files contain, it works or is reported in clear lines."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungs.common.errors import UserError
from rungs.data.bpe import train_bpe
from rungs.data.tokenizer import Tokenizer
from rungs.data.tokenizer_files import load_tokenizer
from rungs.huggingface.hf_tokenizer import convert_tokenizer
from tests.faults.fuzzing import (
    assert_clear,
    attempt,
    bad_bytes,
    bad_json,
    bad_object,
    examples,
    in_place,
    put,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"
TEXTS = ("", " ", "The lamp, 日本 😀\n\n  <s></s> <|endoftext|>\0", "\ud800")
CONFIG: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": True,
    "add_prefix_space": True,
    "legacy": False,
    "added_tokens_decoder": {"2": {"content": "</s>", "special": True, "lstrip": False}},
}
GPT2_CONFIG = CONFIG | {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {}}
ADDED = {"<new>": 400, "</s>": 2}


def use(path: Path) -> Tokenizer:
    """Use a tokenizer as data and generation do."""
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        try:
            ids = tokenizer.encode_prompt(text)
        except UserError as error:
            assert_clear(str(error))
            continue
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        assert isinstance(tokenizer.decode(ids, skip_special_tokens=True), str)
        assert tokenizer.byte_count(ids) >= 0
    assert tokenizer.definition
    return tokenizer


def copy_tokenizer(family: str, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FIXTURES / family, folder)
    (folder / "expected.json").unlink()
    return folder


def valid(family: str, name: str) -> Any:
    return json.loads((FIXTURES / family / name).read_text())


def _small(family: str) -> dict[str, Any]:
    """Return a `tokenizer.json` without most of its vocabulary."""
    content: dict[str, Any] = valid(family, "tokenizer.json")
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: vocabulary[token] for token in list(vocabulary)[:300]}
    content["model"]["merges"] = []
    return content


trained = train_bpe(["ab ab ab"], 258)
SMALL = [json.loads(trained._tokenizer.to_str()), *map(_small, ("gemma", "llama3", "qwen"))]


@examples(60)
@given(fault=in_place(st.sampled_from(SMALL).flatmap(bad_json)))
def test_any_tokenizer_json(fault: Any, tmp_path: Path) -> None:
    fault(tmp_path / "tokenizer.json")
    attempt(lambda: use(tmp_path), tmp_path, "tokenizer.json", str(tmp_path))
    attempt(lambda: use(tmp_path / "tokenizer.json"), tmp_path, "tokenizer.json")


kinds = st.sampled_from(["WordLevel", "WordPiece", "Unigram", "BPE"])


@examples(40)
@given(kind=kinds, data=st.data())
def test_any_other_kind_of_model(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    vocabulary: Any = {"a": 0, "b": 1, "[UNK]": 2}
    if kind == "Unigram":
        vocabulary = [["a", -1.0], ["b", -2.0], ["[UNK]", 0.0]]
    model = {"type": kind, "vocab": vocabulary, "unk_token": "[UNK]", "merges": [], "unk_id": 2}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    content = {"version": "1.0", "model": model, "added_tokens": []}
    put(tmp_path / "tokenizer.json", data.draw(bad_object(content)))
    attempt(lambda: use(tmp_path), tmp_path, "tokenizer.json")


@examples(40)
@given(fault=in_place(bad_bytes((FIXTURES / "llama2" / "tokenizer.model").read_bytes())))
def test_any_sentencepiece_model(fault: Any, tmp_path: Path) -> None:
    folder = copy_tokenizer("llama2", tmp_path / "model")
    fault(folder / "tokenizer.model")
    attempt(lambda: use(folder), tmp_path, "tokenizer.model", str(folder))
    attempt(lambda: use(folder / "tokenizer.model"), tmp_path, "tokenizer.model")


@examples(50)
@given(
    family=st.sampled_from(["llama2", "gpt2"]),
    config=in_place(st.sampled_from([CONFIG, GPT2_CONFIG]).flatmap(bad_json)),
    added=st.none() | in_place(bad_json(ADDED)),
)
def test_any_files_beside_a_vocabulary(
    family: str, config: Any, added: Any, tmp_path: Path
) -> None:
    folder = copy_tokenizer(family, tmp_path / "model")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    config(folder / "tokenizer_config.json")
    if added:
        added(folder / "added_tokens.json")
    names = ("tokenizer_config.json", "added_tokens.json", "tokenizer.model", "vocab.json")
    attempt(lambda: use(folder), tmp_path, *names)


@examples(40)
@given(
    vocabulary=st.none() | in_place(bad_json(valid("gpt2", "vocab.json"))),
    merges=st.none() | in_place(bad_bytes((FIXTURES / "gpt2" / "merges.txt").read_bytes())),
)
def test_any_vocabulary_and_merges(vocabulary: Any, merges: Any, tmp_path: Path) -> None:
    folder = copy_tokenizer("gpt2", tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    for name, fault in (("vocab.json", vocabulary), ("merges.txt", merges)):
        if fault:
            fault(folder / name)
    attempt(lambda: use(folder), tmp_path, str(folder))


@examples(25)
@given(data=st.data())
def test_any_tokenizer_is_imported_or_reported(data: st.DataObject, tmp_path: Path) -> None:
    folder = copy_tokenizer("open-llama", tmp_path / "model")
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    put(folder / "config.json", data.draw(bad_object(ids)))
    put(folder / "tokenizer_config.json", data.draw(bad_json(CONFIG)))
    try:
        json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError):
        return  # an import reads it before
    made = ("tokenizer.json", "tokenizer_config.json")
    attempt(lambda: convert_tokenizer(folder, 100), tmp_path, str(folder), may_change=made)


@pytest.mark.parametrize("number", [2**31, 2**32 - 1])
def test_a_huge_token_id_takes_no_memory(number: int, tmp_path: Path) -> None:
    content = json.loads(trained._tokenizer.to_str())
    content["model"]["vocab"]["zz"] = number
    put(tmp_path / "tokenizer.json", json.dumps(content).encode())
    attempt(lambda: use(tmp_path), tmp_path, "tokenizer.json")


def test_a_very_long_piece_is_an_error_at_once(tmp_path: Path) -> None:
    piece = b"a" * 300_000
    length = _varint(len(piece)) + piece
    message = b"\x0a" + length
    model = (FIXTURES / "llama2" / "tokenizer.model").read_bytes()
    put(tmp_path / "tokenizer.model", b"\x0a" + _varint(len(message)) + message + model)
    outcome = attempt(lambda: use(tmp_path), tmp_path, "tokenizer.model")
    assert isinstance(outcome, UserError)


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])
