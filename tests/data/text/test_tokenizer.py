"""Tokenizers: encoding, decoding, streams, loading from files, and the ids of other libraries."""

import itertools
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from rungs.common.errors import UserError
from rungs.data.text import tokenizer_files
from rungs.data.text.tokenizer import END_OF_TEXT, Tokenizer, byte_level_tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer

TOKENIZERS = Path(__file__).parents[2] / "fixtures" / "tokenizers"
FAMILIES = sorted(folder.name for folder in TOKENIZERS.iterdir())
ENDS_OF_TEXT = {
    "gemma": "<eos>",
    "gpt2": "<|endoftext|>",
    "llama3": "<|end_of_text|>",
    "mistral": "</s>",
    "qwen": "<|endoftext|>",
}

SAMPLE = "".join(
    f"Line {i} of a sample,\n  with you and it's spaces.\n\n\n{i * i} naïve 😀 lines\n"
    for i in range(200)
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([SAMPLE], 400)


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer like Llama's (SentencePiece): it marks the start of every text."""
    pieces = ["▁", "a", "b", "</s>"]
    vocabulary = {
        **{f"<0x{i:02X}>": i for i in range(256)},
        **{p: 256 + i for i, p in enumerate(pieces)},
    }
    raw = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["</s>"])
    return Tokenizer(raw)


def test_a_tokenizer_is_trained_without_the_names_of_special_tokens() -> None:
    """Encoding makes them one token, so a merge of their letters would never be used."""
    documents = [SAMPLE[i : i + 300] for i in range(0, len(SAMPLE), 300)]
    trained = train_bpe([END_OF_TEXT.join(documents)], 400)
    assert trained.definition == train_bpe(documents, 400).definition
    used = {number for text in documents for number in trained.encode(text)}
    merged = range(257, trained.vocab_size)
    assert {trained.decode([number]) for number in merged} & {"<|", "|>", "endoftext"} == set()
    assert len(used.intersection(merged)) > 0.8 * len(merged)


def test_a_long_run_of_one_character_is_learned_in_time() -> None:
    """The library's time grows with the square of the run's length: this took 90 s."""
    start = time.monotonic()
    trained = train_bpe(["-" * 200_000], 270)
    assert time.monotonic() - start < 30
    assert len(trained.encode("-" * 256)) == 1


@given(text=st.text().filter(lambda text: END_OF_TEXT not in text))
def test_any_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_count(ids) == len(text.encode())


def test_the_end_of_text_is_one_token_and_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text == 0
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert ids == [*tokenizer.encode("a"), 0, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.byte_count(np.array(ids, np.uint16)) == 2


@given(cuts=st.lists(st.integers(0, 500), max_size=4))
def test_byte_counts_add_up_where_a_cut_splits_a_character(
    tokenizer: Tokenizer, cuts: list[int]
) -> None:
    ids = tokenizer.encode("日本語 naïve 😀" * 20)
    places = [0, *sorted(cuts), len(ids)]
    parts = [ids[start:end] for start, end in itertools.pairwise(places) if start < len(ids)]
    assert sum(map(tokenizer.byte_count, parts)) == len(("日本語 naïve 😀" * 20).encode())


def test_ids_beyond_the_vocabulary_are_ignored(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("you")
    assert tokenizer.decode([*ids, 10_000]) == "you"
    assert tokenizer.byte_count([*ids, 10_000]) == 3
    assert tokenizer.byte_count([]) == 0
    assert tokenizer.decode([]) == ""


def test_half_a_character_is_reported(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="an invalid character"):
        tokenizer.encode("a\udc80")


def test_a_tokenizer_that_is_not_byte_level() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert tokenizer.end_of_text == 259
    ids = tokenizer.encode("ab é")
    assert tokenizer.decode(ids) == "ab é"
    assert tokenizer.byte_count([*ids, 259]) == len("ab é".encode())
    assert "".join(tokenizer.decode(ids) for ids in tokenizer.encode_stream(["ab\nba"] * 9)) == (
        "ab\nba" * 9
    )


def test_encode_ignores_truncation_padding_and_templates(tmp_path: Path) -> None:
    trained = train_bpe([SAMPLE], 300)
    trained.save(tmp_path / "tokenizer.json")
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.post_processor = processors.TemplateProcessing(
        f"{END_OF_TEXT} $0", special_tokens=[(END_OF_TEXT, 0)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "a longer text with you in it"
    assert load_tokenizer(tmp_path).encode(text) == trained.encode(text)


def test_merges_are_not_left_out_at_random(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.9))
    raw.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("abab" * 50) == [2] * 100


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_continuation_gets_no_prefix(scheme: str) -> None:
    raw = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "type": 3}, []))
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), metaspace])
    tokenizer = Tokenizer(raw)
    assert tokenizer.encode("ab") == [0, 1, 2]
    assert tokenizer.continuing.encode("ab") == [1, 2]
    assert tokenizer.continuing.encode(" a b") == [0, 1, 0, 2]
    assert tokenizer.encode("ab") == [0, 1, 2]


def test_a_byte_level_continuation_gets_no_prefix(tokenizer: Tokenizer) -> None:
    raw = byte_level_tokenizer(models.BPE({"Ġ": 0, "a": 1}, []), add_prefix_space=True)
    assert Tokenizer(raw).encode("a") == [0, 1]
    assert Tokenizer(raw).continuing.encode("a") == [1]
    assert tokenizer.continuing.encode(SAMPLE) == tokenizer.encode(SAMPLE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("second", ["yes", " yes", "\n\nno", "é 😀"])
def test_a_text_and_its_continuation_decode_to_both(family: str, second: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / family)
    ids = tokenizer.encode("Is it so?") + tokenizer.continuing.encode(second)
    assert tokenizer.decode(ids) == "Is it so?" + second


# The ids of other libraries


def expected(family: str) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((TOKENIZERS / family / "expected.json").read_bytes())
    assert len(entries) > 30
    return entries


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_those_of_other_libraries(family: str) -> None:
    loaded = load_tokenizer(TOKENIZERS / family)
    for text, entry in expected(family).items():
        assert (text, loaded.encode(text)) == (text, entry["plain"])
        assert (text, loaded.encode_prompt(text)) == (text, entry["prompt"])
        assert loaded.decode(entry["plain"]) == entry.get("decoded", text)
    texts = list(expected(family))
    assert loaded.encode_batch(texts) == [loaded.encode(text) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_text_of_every_family(family: str) -> None:
    """It is not the end of a turn, nor </s>, which is an HTML tag in Gemma."""
    loaded = load_tokenizer(TOKENIZERS / family)
    assert loaded.end_of_text is not None
    assert loaded.decode([loaded.end_of_text]) == ENDS_OF_TEXT[family]


# Streams


def in_pieces(text: str, seed: int) -> Iterator[str]:
    numbers = random.Random(seed)
    start = 0
    while start < len(text):
        end = start + numbers.randint(1, 900)
        yield text[start:end]
        start = end


def streamed(tokenizer: Tokenizer, text: str, seed: int = 0) -> list[int]:
    parts = list(tokenizer.encode_stream(in_pieces(text, seed), chunk_characters=300))
    if len(text) > 2000:
        assert len(parts) > 3
    return [number for part in parts for number in part]


spaces = ["\n", "\n\n", "\n\n\n", " \n", "\n ", "    ", "\t", "\r", "  \n  \n"]
words = st.sampled_from([*spaces, "word", " you", "it's", ".", "1234", "é", "😀", END_OF_TEXT])


@given(text=st.lists(words, min_size=1, max_size=40).map("".join), seed=st.integers(0, 9))
def test_a_stream_gives_the_ids_of_the_full_text(
    tokenizer: Tokenizer, text: str, seed: int
) -> None:
    text = (text + "and\n") * 30
    assert streamed(tokenizer, text, seed) == tokenizer.encode(text)


@pytest.mark.parametrize("text", ["", "\n" * 3000, "x" * 3000, "word " * 900, "a b\n" * 900])
def test_streams_of_unusual_texts_lose_nothing(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(streamed(tokenizer, text)) == text


def test_a_stream_with_gpt4_splitting() -> None:
    """GPT-4's pattern joins punctuation and line ends; GPT-2's does not."""
    pattern = r"\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+"
    raw = tokenizers.Tokenizer.from_str(train_bpe([SAMPLE], 600)._tokenizer.to_str())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    text = "A line.\n\n\nAnother;\n  code()\n" * 100
    assert streamed(Tokenizer(raw), text) == Tokenizer(raw).encode(text)


# Loading


def test_loading_from_a_folder_or_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    tokenizer.save(tmp_path / "mine.json")
    for place in (tmp_path, tmp_path / "mine.json"):
        assert load_tokenizer(place).encode(SAMPLE) == tokenizer.encode(SAMPLE)
        assert load_tokenizer(str(place)).encode(SAMPLE) == tokenizer.encode(SAMPLE)


@pytest.mark.parametrize("place", ["absent.json", "./absent", "a/b/c"])
def test_a_missing_file_is_not_looked_for_on_the_hub(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "hub", None)
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer(place)


def test_a_folder_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no tokenizer: neither tokenizer\.json nor vocab"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_file_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer file|not UTF-8"):
        load_tokenizer(tmp_path)


def gpt2_folder(folder: Path, **config: object) -> Path:
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(TOKENIZERS / "gpt2" / name, folder / name)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "GPT2Tokenizer", "legacy": None}])
def test_gpt2_files(tmp_path: Path, config: dict[str, object]) -> None:
    loaded = load_tokenizer(gpt2_folder(tmp_path, **config))
    for text, entry in expected("gpt2").items():
        assert loaded.encode(text) == entry["plain"]
        assert loaded.encode_prompt(text) == entry["prompt"]
    assert loaded.end_of_text == 0
    assert loaded.decode([0], skip_special_tokens=True) == ""


def test_gpt2_files_with_a_config(tmp_path: Path) -> None:
    loaded = load_tokenizer(gpt2_folder(tmp_path, add_bos_token=True, add_prefix_space=True))
    assert loaded.encode_prompt("the lamp") == [0, *loaded.encode(" the lamp")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", b"{", r"vocab\.json, merges\.txt: not the vocabulary and merges"),
        ("vocab.json", b'{"a": 0}', "not the vocabulary and merges"),
        ("merges.txt", b"no merge at all", "not the vocabulary and merges"),
        ("merges.txt", b"#version: 0.2\nunknown pair\n", "not the vocabulary and merges"),
        ("tokenizer_config.json", b'{"tokenizer_class": "Qwen2Tokenizer"}', "Qwen2Tokenizer.*get"),
    ],
)
def test_damaged_gpt2_files_are_reported(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (gpt2_folder(tmp_path) / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_gpt2_vocabulary_without_some_bytes_is_reported(tmp_path: Path) -> None:
    """The library would silently drop these characters from every text."""
    gpt2_folder(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    vocabulary["renamed"] = vocabulary.pop("Q")
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match="lacks 1 of the 256 bytes"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_is_refused_with_the_call_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(UserError, match=rf'from_pretrained\("{tmp_path}"\).save_pretrained'):
            load_tokenizer(place)


def test_a_token_that_is_not_spelled_in_bytes_is_itself() -> None:
    raw = tokenizers.Tokenizer(models.WordLevel({"日本": 0, "Ġa": 1, "<0x41>": 2}, "Ġa"))
    raw.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(raw)
    assert [tokenizer.bytes_of(n) for n in range(3)] == ["日本".encode(), b" a", b"<0x41>"]
    assert [tokenizer.byte_count([n]) for n in range(3)] == [6, 2, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_tokens_make_up_the_text(family: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / family)
    text = "The model of  é→x 🙂, two\n\n  lines: naïve 日本語 ..."
    ids = tokenizer.encode(text)
    found = b"".join(map(tokenizer.bytes_of, ids)).decode()
    assert found.removeprefix(" ") == tokenizer.decode(ids)
    assert tokenizer.decode([ids[0], *ids])[len(tokenizer.decode([ids[0]])) :] == found
    assert {tokenizer.bytes_of(number) for number in (*tokenizer.special_ids, 10**6)} == {b""}
