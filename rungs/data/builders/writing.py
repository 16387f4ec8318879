"""Writing the token files of a dataset, split by split."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.common.run_log import log
from rungs.data import dataset, tokenizer_files
from rungs.data.builders.sections import Progress, TextSection
from rungs.data.token_file import Texts, TokenWriter
from rungs.data.tokenizer import Tokenizer

NO_TEXT = "there is no text for the {} split; give more text or change --validation-percent"
_LARGEST_UINT16_VOCAB = 1 << 16

S = TypeVar("S", bound=TextSection)
W = TypeVar("W", bound=TokenWriter)


def write_splits(
    folder: Path,
    sections: Mapping[dataset.Split, Sequence[S]],
    tokenizer: Tokenizer,
    open_writer: Callable[[Path, str], W],
    write_section: Callable[[W, S, Progress], None],
    lacking: str = NO_TEXT,
) -> None:
    """Write each split's token file, section by section, and the tokenizer. `open_writer` gets a
    path and a dtype. Raises UserError with the message `lacking` if a split gets no tokens."""
    size = sum(section.size for split in sections.values() for section in split)
    with run_log.byte_progress("tokenizing", size) as bar:
        for split, parts in sections.items():
            path = folder / dataset.split_file(split)
            with open_writer(path, token_dtype(tokenizer.vocab_size)) as writer:
                for section in parts:
                    write_section(writer, section, bar.update)
            if not writer.tokens:
                raise UserError(lacking.format(split))
    tokenizer_files.save_tokenizer(tokenizer, folder)


def log_texts(tokenizer: Tokenizer, end: int | None) -> Texts | None:
    """Log the tokens that begin and end texts; return them, or None if none begin texts."""
    log.info("%s", tokenizer.describe_texts(tokenizer.begin))
    return Texts(begin=tokenizer.begin, end=end) if tokenizer.begin else None


def token_dtype(vocab_size: int) -> str:
    """Return the safetensors name of the 2- or 4-byte dtype that holds every token id."""
    return "U16" if vocab_size <= _LARGEST_UINT16_VOCAB else "U32"
