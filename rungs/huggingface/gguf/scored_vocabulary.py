"""A vocabulary whose pieces have scores instead of merges, as SentencePiece's BPE
(Kudo & Richardson 2018, https://aclanthology.org/D18-2012) has it: the pair of neighbouring pieces
with the best result merges first."""

from typing import NamedTuple

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

_SPACE = "▁"  # U+2581 LOWER ONE EIGHTH BLOCK stands for a space inside pieces


class Piece(NamedTuple):
    """A token of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


class ScoredVocabulary(NamedTuple):
    """Pieces by id. Characters without a piece become bytes."""

    pieces: list[Piece]
    adds_space: bool
    """Whether a space is added before a text, and after each special token in it."""

    def merges(self) -> list[tuple[str, str]]:
        """Return all pairs of pieces that merge into a third, those with the best result first."""
        scores = {
            piece.text: piece.score for piece in self.pieces if piece.kind == TokenType.NORMAL
        }
        merges = [
            (-score, -cut, (text[:cut], text[cut:]))
            for text, score in scores.items()
            for cut in range(1, len(text))
            if text[:cut] in scores and text[cut:] in scores
        ]
        merges.sort(key=lambda merge: merge[:2])
        return [pair for _, _, pair in merges]

    def to_tokenizer(self) -> tokenizers.Tokenizer:
        """Return a tokenizer that gives the same ids."""
        model = models.BPE(
            {piece.text: number for number, piece in enumerate(self.pieces)},
            self.merges(),
            unk_token=self._texts_of(TokenType.UNKNOWN)[0],
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.adds_space:
            # Metaspace with ▁ alone would add none before a text that begins with ▁
            added = pre_tokenizers.Metaspace(" ", prepend_scheme="always", split=False)
            marked = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=False)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([added, marked])
            decoding.append(decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence(decoding)
        for kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special = [AddedToken(text, normalized=False) for text in self._texts_of(kind)]
            tokenizer.add_special_tokens(special)
        # Matched after spaces became ▁, as some pieces, such as Gemma's, are several spaces.
        user_defined = self._texts_of(TokenType.USER_DEFINED)
        tokenizer.add_tokens([AddedToken(text, normalized=True) for text in user_defined])
        return tokenizer

    def _texts_of(self, kind: TokenType) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind == kind]
