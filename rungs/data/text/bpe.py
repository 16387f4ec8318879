"""Train a byte-level BPE tokenizer (Sennrich et al. 2016; bytes and text splitting as in GPT-2)."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rungs.common.errors import UserError
from rungs.data.text.tokenizer import END_OF_TEXT, Tokenizer

SMALLEST_VOCAB = 257
"""The 256 bytes and the end-of-text token."""
_LONGEST_PIECE = 1024
"""Characters. A merge's time grows with the square of it: a million dashes took minutes."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer with `vocab_size` tokens: the 256 bytes, end of text, and BPE merges; fewer
    if no pair occurs twice any more. The end-of-text token's name is removed from the texts, as
    encoding would turn it into that token. Raises UserError if `vocab_size` is too small."""
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(f"a vocabulary of {vocab_size} is too small; use at least {SMALLEST_VOCAB}")
    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = (document for text in texts for document in text.split(END_OF_TEXT))
    splits = tokenizer.pre_tokenizer
    shortened = [splits, pre_tokenizers.FixedLength(_LONGEST_PIECE)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(shortened)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.pre_tokenizer = splits
    return Tokenizer(tokenizer)


def byte_level_tokenizer(
    model: models.BPE, *, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text the way GPT-2's does, then applies `model`."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
