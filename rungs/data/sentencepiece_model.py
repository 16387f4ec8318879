"""SentencePiece models (`tokenizer.model`): read without their own library, made into tokenizers.

The numbers of fields, kinds and model types are those of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, the wire format
that of https://protobuf.dev/programming-guides/encoding/.
"""

import math
import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Self

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
"""In characters, each of which is a place to cut it; SentencePiece trains pieces of up to 16."""
_SPACE = "▁"  # U+2581 LOWER ONE EIGHTH BLOCK, which stands for a space inside pieces

_Fields = dict[int, int | bytes]


class Piece(NamedTuple):
    """A token of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """A byte-pair vocabulary of SentencePiece, and what it does to the spaces of a text (Kudo &
    Richardson 2018, https://aclanthology.org/D18-2012)."""

    pieces: list[Piece]
    byte_fallback: bool
    """Characters that are no piece become their bytes, not the unknown piece."""
    bos: str | None
    eos: str | None
    adds_dummy_prefix: bool
    """A space is put before every text."""
    removes_extra_spaces: bool
    """Spaces at both ends are dropped, runs of them are one."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read the contents of a `tokenizer.model`.

        Raises:
            ValueError: it is damaged, not SentencePiece's, or of a kind that cannot be converted.
        """
        parts = list(_fields(data))
        specs = dict(parts)
        if _TRAINER not in specs or _NORMALIZER not in specs:
            raise ValueError("it ends too soon")
        trainer = dict(_fields(_as_bytes(specs[_TRAINER])))
        normalizer = dict(_fields(_as_bytes(specs[_NORMALIZER])))
        pieces = [_piece(value) for field, value in parts if field == _PIECES]
        _refuse_unsupported(pieces, trainer, normalizer)
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
        """The tokenizer that gives the ids SentencePiece does.

        The names of control and unknown pieces inside a text become these pieces; SentencePiece
        itself takes them for text. Two more differences: a dummy prefix is neither put before a
        text that starts with a user-defined piece nor becomes part of one, and among pieces of
        equal score, which trained models do not have, the order of merging is another.

        Args:
            prefix_after_special_tokens: put the dummy prefix also after each special token inside
                a text, not only at its start: `"legacy": true` in `tokenizer_config.json`.
        """
        made = tokenizers.Tokenizer(self._model())
        made.normalizer = self._normalizer()
        cleaned = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.adds_dummy_prefix:
            made.pre_tokenizer = _dummy_prefix("always" if prefix_after_special_tokens else "first")
            cleaned.append(decoders.Strip(" ", 1, 0))
        made.decoder = decoders.Sequence(cleaned)
        made.add_special_tokens([AddedToken(t, normalized=False) for t in self._of(CONTROL)])
        made.add_special_tokens([AddedToken(t, normalized=False) for t in self._of(UNKNOWN)])
        # Where spaces are ▁ already, for pieces such as Gemma's runs of them.
        made.add_tokens([AddedToken(t, normalized=True) for t in self._of(USER_DEFINED)])
        return made

    def _of(self, kind: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == kind]

    def _model(self) -> models.BPE:
        return models.BPE(
            {piece.text: number for number, piece in enumerate(self.pieces)},
            self._merges(),
            unk_token=self._of(UNKNOWN)[0],
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
        )

    def _merges(self) -> list[tuple[str, str]]:
        """Every way to put a piece together from two, the best piece first."""
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
        """What becomes of spaces. Where extra ones go and there is a dummy prefix, one left at the
        start stays a space, by which `_dummy_prefix` knows that it is there."""
        if not self.removes_extra_spaces:
            return normalizers.Replace(" ", _SPACE)
        start = [] if self.adds_dummy_prefix else [_replace(r"\A +", "")]
        marked = [_replace(" {2,}", " "), _replace(r"(?!\A) ", _SPACE)]
        return normalizers.Sequence([*start, *marked, _replace(rf"[ {_SPACE}]+\z", "")])


def _dummy_prefix(scheme: str) -> pre_tokenizers.PreTokenizer:
    """Put ▁ before a text that does not start with a true space, and where that stands. (A lone
    Metaspace of ▁ would put none before a text that starts with a space of its own.)"""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(" ", prepend_scheme=scheme, split=False),
            pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False),
        ]
    )


def _replace(pattern: str, by: str) -> normalizers.Replace:
    return normalizers.Replace(tokenizers.Regex(pattern), by)


def _refuse_unsupported(pieces: list[Piece], trainer: _Fields, normalizer: _Fields) -> None:
    kinds = Counter(piece.kind for piece in pieces)
    if len({piece.text for piece in pieces}) < len(pieces) or kinds[UNKNOWN] != 1:
        raise ValueError("its pieces are not all different, with one for what is unknown")
    if (found := trainer.get(_MODEL_TYPE, _UNIGRAM)) != _BPE:
        kind = "a unigram model" if found == _UNIGRAM else f"of model type {found!r}"
        raise ValueError(f"it is {kind}; only BPE can be converted")
    if normalizer.get(_CHARACTER_MAP):
        # tokenizers has Precompiled for it, which loses accents of decomposed characters:
        # https://github.com/huggingface/tokenizers/issues/2334
        raise ValueError("it replaces characters before it splits (NFKC or the like)")
    if trainer.get(_SPACE_AS_SUFFIX) or not normalizer.get(_MARKED_SPACES, 1):
        raise ValueError("it does not mark spaces by ▁ at the start of words")
    if any(piece.kind == NORMAL and len(piece.text) > _LONGEST_PIECE for piece in pieces):
        raise ValueError(f"a piece has more than {_LONGEST_PIECE} characters")
    if kinds[UNUSED]:
        raise ValueError("some of its pieces are marked as unused")


def _piece(message: int | bytes) -> Piece:
    fields = dict(_fields(_as_bytes(message)))
    packed, kind = _as_bytes(fields.get(_SCORE, bytes(4))), fields.get(_KIND, NORMAL)
    if len(packed) != 4 or not isinstance(kind, int) or not NORMAL <= kind <= BYTE:
        raise ValueError("a piece cannot be read")
    (score,) = struct.unpack("<f", packed)
    if not math.isfinite(score):
        raise ValueError(f"a piece has the score {score}")
    return Piece(_as_bytes(fields.get(_TEXT, b"")).decode(), score, kind)


# Protocol Buffers


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: integers, or the bytes of everything else."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            number, place = _varint(message, place)
            yield field, number
            continue
        if wire_type == 2:
            length, place = _varint(message, place)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"byte {place} is part of no field")
        if place + length > len(message):
            raise ValueError("it ends too soon")
        yield field, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the lowest first, and the place after it."""
    number = 0
    for shift in range(0, 70, 7):
        if place == len(message):
            raise ValueError("it ends too soon")
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
    raise ValueError(f"byte {place} is part of no number")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError(f"the number {value} is where text should be")
    return value
