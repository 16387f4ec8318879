"""Batches of texts have the ids of the tokenizer, with tiktoken and without."""

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rungs.data.batch_encoder import BatchEncoder, as_tiktoken
from rungs.data.bpe import train_bpe
from rungs.data.tokenizer import Tokenizer
from tests.support.document_files import texts

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINED = train_bpe([f"{text}'ll say  it's 12345\n\n" for text in texts(300)], 600)


def changed(**changes: Any) -> Tokenizer:
    """Return the trained tokenizer with parts of its definition replaced."""
    definition = json.loads(TRAINED._tokenizer.to_str()) | changes
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(definition)))


def with_pattern(regex: str) -> Tokenizer:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    bytes_only = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, bytes_only]})


TOKENIZERS = {"trained here": TRAINED, "a pattern of its own": with_pattern(LLAMA_3)}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text() | st.text("ab '\n 1九é<|endoftext>", max_size=40))
@settings(max_examples=300, deadline=None)
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


OTHER_MODEL = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
SWAPPED = json.loads(TRAINED.definition)["model"]
SWAPPED["merges"][:2] = reversed(SWAPPED["merges"][:2])


@pytest.mark.parametrize(
    "changes",
    [{"normalizer": {"type": "NFC"}}, {"model": OTHER_MODEL}, {"model": SWAPPED}],
    ids=["a normalizer", "no BPE", "ids that aren't in the order of merges"],
)
def test_other_tokenizers_are_used_as_they_are(changes: dict[str, Any]) -> None:
    tokenizer = changed(**changes)
    assert as_tiktoken(tokenizer) is None
    encoder, batch = BatchEncoder(tokenizer), ["a b", "two words"]
    assert [ids.tolist() for ids in encoder.encode(batch)] == tokenizer.encode_batch(batch)


def test_tiktoken_is_dropped_if_it_gives_other_ids(caplog: pytest.LogCaptureFixture) -> None:
    encoder = BatchEncoder(TRAINED)
    encoder._fast = as_tiktoken(with_pattern(r"\S"))
    batch = texts(5)
    assert [ids.tolist() for ids in encoder.encode(batch)] == TRAINED.encode_batch(batch)
    assert "going on without it" in caplog.text
    assert encoder._fast is None
