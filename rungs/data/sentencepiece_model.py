"""Convert SentencePiece models (`tokenizer.model`) to tokenizers, without SentencePiece's library.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto"""

import math
import struct
from collections import Counter
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

# Fields of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK, _BOS_PIECE, _EOS_PIECE = 3, 24, 35, 46, 47
_CHARACTER_MAP, _DUMMY_PREFIX, _NO_EXTRA_SPACES, _MARKED_SPACES = 2, 3, 4, 5

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2

_LONGEST_PIECE = 1000
"""Characters of a piece, which limit its number of merges; SentencePiece trains at most 16."""
_SPACE = "▁"  # U+2581 LOWER ONE EIGHTH BLOCK stands for a space inside pieces

_Fields = dict[int, Any]


class Piece(NamedTuple):
    """A token of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """A BPE vocabulary of SentencePiece with its handling of spaces (Kudo & Richardson 2018,
    https://aclanthology.org/D18-2012)."""

    pieces: list[Piece]
    byte_fallback: bool
    """Whether characters without a piece become bytes instead of the unknown piece."""
    bos: str | None
    eos: str | None
    adds_dummy_prefix: bool
    """Whether a space is added before every text."""
    removes_extra_spaces: bool
    """Whether spaces at both ends are removed, and runs of them reduced to one."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the contents of a `tokenizer.model`. Raises ValueError if it is damaged, not from
        SentencePiece, or cannot be converted."""
        parts = _numbered_fields(data)
        specs = dict(parts)
        if _TRAINER not in specs or _NORMALIZER not in specs:
            raise ValueError("it is incomplete")
        trainer = _fields(_as_bytes(specs[_TRAINER]))
        normalizer = _fields(_as_bytes(specs[_NORMALIZER]))
        pieces = [_piece(value) for field, value in parts if field == _PIECES]
        _check_supported(pieces, trainer, normalizer)
        controls = {piece.text for piece in pieces if piece.kind == CONTROL}
        bos = _as_bytes(trainer.get(_BOS_PIECE, b"<s>")).decode()
        eos = _as_bytes(trainer.get(_EOS_PIECE, b"</s>")).decode()
        return cls(
            pieces,
            byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
            bos=bos if bos in controls else None,
            eos=eos if eos in controls else None,
            adds_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
            removes_extra_spaces=bool(normalizer.get(_NO_EXTRA_SPACES, 1)),
        )

    def to_tokenizer(self, *, prefix_after_special_tokens: bool = False) -> tokenizers.Tokenizer:
        """Return a tokenizer that gives the same ids as SentencePiece, with three differences:

        - The name of a control or unknown piece inside a text becomes that piece, not text.
        - A dummy prefix is not added before a user-defined piece, and never becomes part of one.
        - Pieces of equal score, which trained models do not have, are merged in another order.

        `prefix_after_special_tokens` adds the dummy prefix also after each special token inside a
        text, as `"legacy": true` in `tokenizer_config.json` does."""
        model = models.BPE(
            {piece.text: number for number, piece in enumerate(self.pieces)},
            self.merges(),
            unk_token=self._texts_of(UNKNOWN)[0],
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = self._normalizer()
        decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.adds_dummy_prefix:
            scheme = "always" if prefix_after_special_tokens else "first"
            tokenizer.pre_tokenizer = _dummy_prefix(scheme)
            decoding.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(decoding)
        for kind in (CONTROL, UNKNOWN):
            special = [AddedToken(text, normalized=False) for text in self._texts_of(kind)]
            tokenizer.add_special_tokens(special)
        # Matched after spaces became ▁, as some pieces, such as Gemma's, are several spaces.
        user_defined = self._texts_of(USER_DEFINED)
        tokenizer.add_tokens([AddedToken(text, normalized=True) for text in user_defined])
        return tokenizer

    def _texts_of(self, kind: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == kind]

    def merges(self) -> list[tuple[str, str]]:
        """Return all pairs of pieces that merge into a third, those with the best result first."""
        scores = {piece.text: piece.score for piece in self.pieces if piece.kind == NORMAL}
        merges = [
            (-score, -cut, (text[:cut], text[cut:]))
            for text, score in scores.items()
            for cut in range(1, len(text))
            if text[:cut] in scores and text[cut:] in scores
        ]
        merges.sort(key=lambda merge: merge[:2])
        return [pair for _, _, pair in merges]

    def _normalizer(self) -> normalizers.Normalizer:
        """Return the normalization of spaces. If it removes extra spaces and there is a dummy
        prefix, a space at the start of a text stays a space, for `_dummy_prefix` to see."""
        if not self.removes_extra_spaces:
            return normalizers.Replace(" ", _SPACE)
        start = [] if self.adds_dummy_prefix else [_replace(r"\A +", "")]
        marked = [_replace(" {2,}", " "), _replace(r"(?!\A) ", _SPACE)]
        return normalizers.Sequence([*start, *marked, _replace(rf"[ {_SPACE}]+\z", "")])


def _dummy_prefix(scheme: str) -> pre_tokenizers.PreTokenizer:
    """Add ▁ before a text, or replace its leading space. Metaspace with ▁ alone would add none
    before a text that begins with ▁."""
    added = pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False)
    marked = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
    return pre_tokenizers.Sequence([added, marked])


def _replace(pattern: str, by: str) -> normalizers.Replace:
    return normalizers.Replace(tokenizers.Regex(pattern), by)


def _check_supported(pieces: list[Piece], trainer: _Fields, normalizer: _Fields) -> None:
    kinds = Counter(piece.kind for piece in pieces)
    if len({piece.text for piece in pieces}) < len(pieces) or kinds[UNKNOWN] != 1:
        raise ValueError("its pieces are not all different, with one for unknown text")
    if (found := trainer.get(_MODEL_TYPE, _UNIGRAM)) != _BPE:
        kind = "a unigram model" if found == _UNIGRAM else f"of model type {found!r}"
        raise ValueError(f"it is {kind}; only BPE can be converted")
    if normalizer.get(_CHARACTER_MAP):
        # Precompiled of tokenizers does it, but loses accents of decomposed characters:
        # https://github.com/huggingface/tokenizers/issues/2334
        raise ValueError("it replaces characters before it splits (NFKC or the like)")
    if trainer.get(_SPACE_AS_SUFFIX) or not normalizer.get(_MARKED_SPACES, 1):
        raise ValueError("it does not mark spaces with ▁ at the start of words")
    if any(piece.kind == NORMAL and len(piece.text) > _LONGEST_PIECE for piece in pieces):
        raise ValueError(f"a piece has more than {_LONGEST_PIECE} characters")
    if kinds[UNUSED]:
        raise ValueError("some of its pieces are marked as unused")


def _piece(message: int | bytes) -> Piece:
    fields = _fields(_as_bytes(message))
    kind, bits = fields.get(_KIND, NORMAL), fields.get(_SCORE, 0)
    is_number = isinstance(kind, int) and isinstance(bits, int) and bits < 1 << 32
    if not is_number or not NORMAL <= kind <= BYTE:
        raise ValueError("a piece cannot be read")
    (score,) = struct.unpack("<f", struct.pack("<I", bits))
    if not math.isfinite(score):
        raise ValueError(f"a piece has the score {score}")
    return Piece(_as_bytes(fields.get(_TEXT, b"")).decode(), score, kind)


def _numbered_fields(message: bytes) -> list[tuple[int, Any]]:
    """Return the number and the value of each field: an integer, or bytes. Raises ValueError."""
    # few tokenizers need it
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    fields = Empty()
    try:
        fields.ParseFromString(message)
    except DecodeError:
        raise ValueError("it is incomplete, or not from SentencePiece") from None
    return [(field.field_number, field.data) for field in UnknownFieldSet(fields)]


def _fields(message: bytes) -> _Fields:
    return dict(_numbered_fields(message))


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"{value} is in the place of text")
    return value
