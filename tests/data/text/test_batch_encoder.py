"""Batches of texts have the ids of the tokenizer, with tiktoken and without."""

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rungs.data.text.batch_encoder import KNOWN_PATTERNS, BatchEncoder, as_tiktoken
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from tests.support.document_files import texts

TRAINED = train_bpe([f"{text}'ll say  it's 12345\n\n" for text in texts(300)], 600)


def changed(**changes: Any) -> Tokenizer:
    """Return the trained tokenizer with parts of its definition replaced."""
    definition = json.loads(TRAINED._tokenizer.to_str()) | changes
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(definition)))


def pattern(regex: str) -> dict[str, Any]:
    """Return a pre-tokenizer that splits at a pattern, as those of Llama 3 and Qwen."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    bytes_only = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, bytes_only]}


TOKENIZERS = {"trained here": TRAINED} | {
    name: changed(pre_tokenizer=pattern(regex)) for name, regex in KNOWN_PATTERNS.items()
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text() | st.text("ab '\n 1九é<|endoftext>", max_size=40))
@settings(max_examples=40, deadline=None)
def test_tiktoken_has_the_same_ids(name: str, text: str) -> None:
    fast = as_tiktoken(TOKENIZERS[name])
    assert fast is not None
    assert fast.encode(text, allowed_special="all") == TOKENIZERS[name].encode(text)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_batches_have_the_ids_of_each_text(tokenizer: Tokenizer) -> None:
    encoder = BatchEncoder(tokenizer)
    for seed in range(3):
        batch = [*texts(20, seed), "", "a<|endoftext|>b"]
        for ids, text in zip(encoder.encode(batch), batch, strict=True):
            assert ids.dtype == np.uint32
            assert ids.tolist() == tokenizer.encode(text)
    assert encoder._fast is not None


MODEL, [END] = (
    json.loads(TRAINED.definition)["model"],
    json.loads(TRAINED.definition)["added_tokens"],
)
WORDS = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
SWAPPED = [*reversed(MODEL["merges"][:2]), *MODEL["merges"][2:]]
OTHERS: dict[str, dict[str, Any]] = {
    "a normalizer": {"normalizer": {"type": "NFC"}},
    "no BPE": {"model": WORDS},
    "ids that aren't in the order of merges": {"model": MODEL | {"merges": SWAPPED}},
    "a suffix of words": {"model": MODEL | {"end_of_word_suffix": "e"}},
    "a pattern with gaps": {"pre_tokenizer": pattern(r"\w+|x")},
    "a token that is a word of its own": {"added_tokens": [END | {"single_word": True}]},
    "a token that takes spaces": {"added_tokens": [END | {"lstrip": True}]},
    "a token that isn't special": {"added_tokens": [END | {"special": False}]},
    "a token that begins another": {
        "added_tokens": [END, END | {"id": 600, "content": f"{END['content']}>"}]
    },
    "tokens that are looked for one after another": {
        "added_tokens": [END, END | {"id": 600, "content": ">x", "normalized": True}]
    },
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_other_tokenizers_are_used_as_they_are(changes: dict[str, Any]) -> None:
    tokenizer = changed(**changes)
    assert as_tiktoken(tokenizer) is None
    encoder, batch = BatchEncoder(tokenizer), ["a b", "two words<|endoftext|>>x"]
    assert [ids.tolist() for ids in encoder.encode(batch)] == tokenizer.encode_batch(batch)


def generated(rng: random.Random) -> Tokenizer:
    """Return a byte-level tokenizer with some merges of three letters and some added tokens, which
    in most cases are of the usual kind."""
    vocab = {token: rank for token, rank in MODEL["vocab"].items() if len(token) == 1}
    merges: list[list[str]] = []
    for _ in range(rng.randrange(12)):
        pair = rng.choices(["a", "b", "Ġ", *list(vocab)[256:]], k=2)  # Ġ is a space
        if "".join(pair) not in vocab:
            vocab["".join(pair)] = len(vocab) + 1
            merges.append(pair)
    if rng.random() < 0.1:
        rng.shuffle(merges)
    names = sorted({"".join(rng.choices("ab<", k=rng.randint(2, 3))) for _ in range(2)})
    added = [
        END
        | {"content": name, "id": vocab.get(name, 1000 + number), "special": rng.random() < 0.95}
        | {flag: rng.random() < 0.05 for flag in ("single_word", "lstrip", "rstrip", "normalized")}
        for number, name in enumerate(names)
    ]
    options = {"vocab": vocab, "merges": merges, "ignore_merges": rng.random() < 0.5}
    return changed(model=MODEL | options, added_tokens=added)


@pytest.mark.long
def test_whatever_tiktoken_is_used_for_has_the_same_ids() -> None:
    """In 200 of 500 tokenizers it is."""
    rng, used = random.Random(0), 0
    for _ in range(500):
        tokenizer = generated(rng)
        batch = ["".join(rng.choices("aab  <é", k=rng.randrange(30))) for _ in range(20)]
        if fast := as_tiktoken(tokenizer):
            used += 1
            assert fast.encode_batch(batch, allowed_special="all") == tokenizer.encode_batch(batch)
    assert used > 100


def test_a_row_of_a_million_spaces() -> None:
    text = f"a{' ' * 1_000_000}b"
    [ids] = BatchEncoder(TRAINED).encode([text])
    assert ids.tolist() == TRAINED.encode(text)


@pytest.mark.long
@pytest.mark.parametrize("name", TOKENIZERS)
def test_both_libraries_know_the_same_letters_digits_and_spaces(name: str) -> None:
    """Merges of a letter, a digit or a sign and what follows it show where pieces end. Of scripts
    every 17th character, as blocks of them are longer."""
    vocab = {token: rank for token, rank in MODEL["vocab"].items() if len(token) == 1}
    merges = [[first, token] for first in "a1!Ġ" for token in vocab]
    vocab |= {"".join(pair): 1000 + rank for rank, pair in enumerate(merges)}
    pre_tokenizer = json.loads(TOKENIZERS[name].definition)["pre_tokenizer"]
    model = MODEL | {"vocab": vocab, "merges": merges}
    tokenizer = changed(model=model, pre_tokenizer=pre_tokenizer)
    fast = as_tiktoken(tokenizer)
    assert fast is not None
    every = [*range(0x3000), *range(0x3000, sys.maxunicode + 1, 17)]
    characters = [chr(n) for n in every if not 0xD800 <= n < 0xE000]
    batch = [f"a{c}a 1{c}1 !{c}! {c} \n{c}\n'{c}" for c in characters]
    assert fast.encode_ordinary_batch(batch) == tokenizer.encode_batch(batch)
