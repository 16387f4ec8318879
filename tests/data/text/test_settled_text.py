"""Text that is shown as it is generated equals the text at the end, with the decoders of known
models."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from rungs.data.text.tokenizer import Tokenizer, byte_level_tokenizer
from rungs.model.generation import decode_stream

BYTES = [f"<0x{number:02X}>" for number in (0x41, 0x0A, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0xFF)]
WORDS = [
    "a",
    "▁b",
    "▁",
    "##c",
    ".",
    "d</w>",
    "</w>",
    " ",
    "é",
    "\ufffd",
    "<0x41>b",
    "▁<0x41>",
    "XY",
]
SPECIAL = "</s>"
REPLACE = decoders.Replace("▁", " ")
LLAMA = [REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
STREAMED = {
    "none": None,
    "llama": decoders.Sequence(LLAMA),
    "gemma": decoders.Sequence(LLAMA[:3]),
    "bytes alone": decoders.ByteFallback(),
    "metaspace": decoders.Metaspace(),
    "metaspace and bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "word pieces": decoders.WordPiece("##", cleanup=True),
    "word pieces and bytes": decoders.Sequence([decoders.WordPiece(), decoders.ByteFallback()]),
    "byte level": decoders.ByteLevel(),
}


def tokenizer_with(decoder: Any) -> Tokenizer:
    names = [SPECIAL, *BYTES, *WORDS]
    raw = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "a"))
    raw.add_special_tokens([SPECIAL])
    if decoder is not None:
        raw.decoder = decoder
    return Tokenizer(raw)


TOKENIZERS = {name: tokenizer_with(found) for name, found in STREAMED.items()}
TOKENIZERS["bytes of BPE"] = Tokenizer(
    byte_level_tokenizer(models.BPE({"Ã": 0, "©": 1, "a": 2}, []))
)


@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(st.lists(st.integers(0, len(BYTES) + len(WORDS) + 1), max_size=4), max_size=12),
)
def test_the_pieces_are_the_text(name: str, chunks: list[list[int]]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [number for chunk in chunks for number in chunk]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(decode_stream(chunks, tokenizer)) == text
    for count in range(len(ids)):
        assert text.startswith(tokenizer.decode_settled(ids[:count]))


@pytest.mark.parametrize("name", STREAMED)
def test_text_is_shown_before_its_end(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [1 + len(BYTES), 2 + len(BYTES), 1 + len(BYTES)]
    assert tokenizer.decode_settled(ids) == tokenizer.decode(ids)


def test_bytes_wait_for_the_end_of_their_run() -> None:
    """A later byte can make U+FFFD of all of them. Special tokens are left out before that."""
    tokenizer, (first, second, letter) = TOKENIZERS["llama"], (3, 4, 1 + len(BYTES))
    assert tokenizer.decode([letter, first, second]) == "aé"
    assert (
        tokenizer.decode([letter, first, second, first], skip_special_tokens=True)
        == "a\ufffd" + "\ufffd" * 2
    )
    for ids in ([first, second], [first, second, 0], [first, 0, second, 999]):
        assert tokenizer.decode_settled([letter, *ids]) == "a"
    assert tokenizer.decode_settled([letter, first, 0, second, letter]) == "aéa"
