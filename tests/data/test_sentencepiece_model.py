"""SentencePiece models: conversion gives the library's ids, and damage is always reported."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.data.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    SentencePieceModel,
)
from rungs.data.tokenizer_files import load_tokenizer

TOKENIZERS = Path(__file__).parents[1] / "fixtures" / "tokenizers"
LLAMA = TOKENIZERS / "llama2"
UNIGRAM, BPE, WORD = 1, 2, 3


def field(number: int, value: int | bytes | float) -> bytes:
    """A Protocol Buffers field; `tests/fixtures` has files that their own library wrote."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def piece(text: str, score: float = 0.0, kind: int = NORMAL) -> bytes:
    return field(1, field(1, text.encode()) + field(2, score) + field(3, kind))


START = [piece("<unk>", kind=UNKNOWN), piece("<s>", kind=CONTROL), piece("</s>", kind=CONTROL)]
LETTERS = [piece(letter, -10.0 - i) for i, letter in enumerate("▁abc")]
TRAINER = field(3, BPE)
BARE = field(3, 0) + field(4, 0)
"""A normalizer that does not change spaces."""


def model(*pieces: bytes, trainer: bytes = TRAINER, normalizer: bytes = BARE) -> bytes:
    return b"".join([*START, *LETTERS, *pieces, field(2, trainer), field(3, normalizer)])


def tokens(data: bytes, text: str) -> list[str]:
    return SentencePieceModel.from_bytes(data).to_tokenizer().encode(text).tokens


# Conversion (`test_tokenizer.py` compares its ids with the library's)


def test_the_model_is_parsed() -> None:
    read = SentencePieceModel.from_bytes((LLAMA / "tokenizer.model").read_bytes())
    assert len(read.pieces) == 600
    assert [(p.text, p.kind) for p in read.pieces[:4]] == [
        ("<unk>", UNKNOWN),
        ("<s>", CONTROL),
        ("</s>", CONTROL),
        ("<0x00>", BYTE),
    ]
    assert (read.bos, read.eos) == ("<s>", "</s>")
    assert read.byte_fallback
    assert read.adds_dummy_prefix
    assert not read.removes_extra_spaces


def test_missing_fields_have_the_defaults_of_the_format() -> None:
    read = SentencePieceModel.from_bytes(model(normalizer=b""))
    assert read.adds_dummy_prefix
    assert read.removes_extra_spaces
    assert not read.byte_fallback
    assert (read.bos, read.eos) == ("<s>", "</s>")


def test_begin_and_end_may_have_other_names_or_be_missing() -> None:
    named = model(piece("<b>", kind=CONTROL), trainer=TRAINER + field(46, b"<b>"))
    assert SentencePieceModel.from_bytes(named).bos == "<b>"
    absent = model(trainer=TRAINER + field(46, b"<b>") + field(41, 2**64 - 1))
    assert SentencePieceModel.from_bytes(absent).bos is None


def test_the_best_piece_is_merged_first() -> None:
    assert tokens(model(piece("ab", -1.0), piece("bc", -2.0)), "abc") == ["ab", "c"]
    assert tokens(model(piece("ab", -2.0), piece("bc", -1.0)), "abc") == ["a", "bc"]


def test_a_piece_that_no_merge_makes_is_never_used() -> None:
    assert tokens(model(piece("abc", -1.0)), "abc") == ["a", "b", "c"]


def test_a_byte_name_in_a_text_is_text() -> None:
    pieces = [piece(character, -20.0) for character in "<0xA>"]
    pieces += [piece("<0x", -2.0), piece("<0", -1.0), piece("0A>", -4.0), piece("0A", -3.0)]
    data = model(*pieces, piece("<0x0A>", kind=BYTE))
    assert tokens(data, "<0x0A>") == ["<0x", "0A>"]


def test_unknown_characters_in_a_row_are_one_piece_without_byte_fallback() -> None:
    assert tokens(model(), "a??b?") == ["a", "<unk>", "b", "<unk>"]


def test_a_saved_conversion_is_the_same(tmp_path: Path) -> None:
    converted = load_tokenizer(LLAMA)
    converted.save(tmp_path / "tokenizer.json")
    saved = load_tokenizer(tmp_path)
    for text in json.loads((LLAMA / "expected.json").read_text(encoding="utf-8")):
        assert saved.encode_prompt(text) == converted.encode_prompt(text)
        assert saved.decode(saved.encode(text)) == converted.decode(converted.encode(text))


# Errors


def test_a_truncated_file_is_reported() -> None:
    whole = model()
    SentencePieceModel.from_bytes(whole)
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="it is incomplete"):
            SentencePieceModel.from_bytes(whole[:end])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"IQ== 0\nIg== 1\n", "it is incomplete"),  # as Llama 3's own tokenizer.model starts
        (b'{"version": "1.0"}', "it is incomplete, or not from"),
        (b"\xff" * 20, "it is incomplete, or not from"),
        (field(1, 7) + model(), "7 is in the place of text"),
        (model(field(1, field(1, b"\xff"))), "utf-8"),
        (model(piece("d", kind=9)), "a piece cannot be read"),
        (model(piece("d", float("nan"))), "a piece has the score nan"),
        (model(piece("a")), "not all different"),
        (model(piece("d", kind=UNKNOWN)), "not all different, with one for unknown text"),
        (model(piece("d", kind=UNUSED)), "marked as unused"),
        (model(trainer=b""), "it is a unigram model; only BPE"),
        (model(trainer=field(3, UNIGRAM)), "it is a unigram model; only BPE"),
        (model(trainer=field(3, WORD)), "it is of model type 3; only BPE"),
        (model(trainer=TRAINER + field(24, 1)), "does not mark spaces"),
        (model(normalizer=field(5, 0)), "does not mark spaces"),
        (model(normalizer=field(2, b"map")), "replaces characters before it splits"),
    ],
)
def test_unsupported_models_are_reported(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SentencePieceModel.from_bytes(data)


def test_the_error_names_the_file_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model(trainer=field(3, UNIGRAM)))
    with pytest.raises(UserError, match=r"tokenizer\.model: .*unigram.*get the model's tokenizer"):
        load_tokenizer(tmp_path)
    assert path.read_bytes()
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


# tokenizer_config.json and added_tokens.json


def llama_folder(folder: Path, **config: object) -> Path:
    shutil.copyfile(LLAMA / "tokenizer.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": True, "add_eos_token": False}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_bos_token": None, "add_eos_token": True}, [1], [2]),
    ],
)
def test_the_config_adds_begin_and_end_to_texts(
    tmp_path: Path, config: dict[str, object], before: list[int], after: list[int]
) -> None:
    tokenizer = load_tokenizer(llama_folder(tmp_path, **config))
    plain = tokenizer.encode("the lamp")
    for loaded in (tokenizer, load_tokenizer(tmp_path / "tokenizer.model")):
        assert (loaded.begin, loaded.template_end) == (before, after)
        assert loaded.encode_prompt("the lamp") == [*before, *plain]


def test_without_a_config_a_prompt_gets_begin_of_text(tmp_path: Path) -> None:
    (llama_folder(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("the") == [1, *tokenizer.encode("the")]


def test_the_dummy_prefix_after_special_tokens(tmp_path: Path) -> None:
    """`legacy`: https://github.com/huggingface/transformers/pull/24565"""
    start, end = load_tokenizer(LLAMA).encode("the"), 2
    old = load_tokenizer(llama_folder(tmp_path, legacy=True))
    assert old.encode("the</s>the") == [*start, end, *start]
    new = load_tokenizer(llama_folder(tmp_path, legacy=False))
    assert new.encode("the</s>the") != [*start, end, *start]
    assert new.encode("the</s> the") == [*start, end, *start]


def test_no_dummy_prefix(tmp_path: Path) -> None:
    bare = load_tokenizer(llama_folder(tmp_path, add_prefix_space=False))
    assert bare.encode(" the") == load_tokenizer(LLAMA).encode("the")
    assert bare.decode(bare.encode("the lamp")) == "the lamp"


def test_added_tokens(tmp_path: Path) -> None:
    entries = {
        "0": {"content": "<unk>", "special": True},
        "601": {"content": "<|im_end|>", "special": True, "rstrip": False, "__type": "AddedToken"},
    }
    llama_folder(tmp_path, added_tokens_decoder=entries)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[PAD]": 600}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 602
    ids = tokenizer.encode("the[PAD]<|im_end|>")
    assert ids == [*tokenizer.encode("the"), 600, 601]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"[PAD]": 601}, r"'\[PAD\]' gets id 600, not 601"),
        ({"[PAD]": 5}, r"'\[PAD\]' gets id 600, not 5"),
        ({"<s>": 600}, "'<s>' gets id 1, not 600"),
        ({"[PAD]": "x"}, "not as transformers writes it"),
    ],
)
def test_wrong_added_tokens_are_reported(
    tmp_path: Path, added: dict[str, object], message: str
) -> None:
    llama_folder(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"legacy": "yes"}',
        '{"added_tokens_decoder": 3}',
        '{"added_tokens_decoder": {"x": {"content": "y"}}}',
        '{"added_tokens_decoder": {"600": {}}}',
        '{"added_tokens_decoder": {"600": "y"}}',
    ],
)
def test_a_damaged_config_is_reported(tmp_path: Path, text: str) -> None:
    (llama_folder(tmp_path) / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not "):
        load_tokenizer(tmp_path)
