"""The dataset builder for tokens of another program. A file that is a token file of Rungs and
becomes all of a split is hard-linked where that is possible; the tokens of others are copied into
one, as uint16 or, if the vocabulary is too large for that, as uint32."""

from collections.abc import Sequence
from pathlib import Path

from rungs.common import disk, run_log
from rungs.common.errors import UserError
from rungs.common.run_log import log
from rungs.data import dataset, tokenizer_files
from rungs.data.builders.sections import Progress, split_sections
from rungs.data.builders.token_formats import TokenSection
from rungs.data.builders.writing import log_texts, token_dtype
from rungs.data.token_file import Texts, TokenWriter
from rungs.data.tokenizer import Tokenizer

_NO_TOKENS = (
    "there are no tokens for the {} split; give more tokens, change --validation-percent, or give a"
    " --validation-file"
)


def build(
    folder: Path,
    files: list[Path],
    validation_files: list[Path],
    vocabulary: Tokenizer | int,
    validation_percent: float,
) -> dataset.Source:
    """Write the token files of a dataset, and the tokenizer if it is known, into its folder.
    `vocabulary` can be the number of its tokens. Without files for validation, it is
    `validation_percent` of the others. Raises UserError if a token is not in the vocabulary, or a
    split has none."""
    found, held_out = (
        [TokenSection.of_file(path) for path in paths] for paths in (files, validation_files)
    )
    splits = split_sections(found, validation_percent)
    if held_out:
        splits = {"train": found, "validation": held_out}
    vocab_size = vocabulary if isinstance(vocabulary, int) else vocabulary.vocab_size
    for part in (*found, *held_out):
        _check_texts(part, vocab_size)
    texts = _texts(splits["train"][0], vocabulary)
    size = sum(part.size * part.dtype.itemsize for parts in splits.values() for part in parts)
    with run_log.byte_progress("reading tokens", size) as bar:
        for split, parts in splits.items():
            if not any(part.size for part in parts):
                raise UserError(_NO_TOKENS.format(split))
            path = folder / dataset.split_file(split)
            if len(parts) == 1 and parts[0].is_token_file:
                _link(path, parts[0], vocab_size, bar.update)
            else:
                _write(path, parts, vocab_size, texts, bar.update)
    if isinstance(vocabulary, Tokenizer):
        tokenizer_files.save_tokenizer(vocabulary, folder)
    return dataset.Source(kind="tokens", files=[path.name for path in [*files, *validation_files]])


def _texts(first: TokenSection, vocabulary: Tokenizer | int) -> Texts | None:
    """Return the tokens that begin and end texts: as the first file says, or else the tokenizer's
    if that file begins with them, or else None."""
    if first.texts or isinstance(vocabulary, int):
        return first.texts
    begin = vocabulary.begin
    begins_texts = bool(begin) and first.first(len(begin)) == begin
    return log_texts(vocabulary, vocabulary.end_of_text) if begins_texts else None


def _check_texts(file: TokenSection, vocab_size: int) -> None:
    for token in file.texts.begin if file.texts else []:
        if token >= vocab_size:
            raise UserError(
                f"{file.path}: its texts begin with the token id {token}, which is not in the"
                f" vocabulary of {vocab_size:,}"
            )


def _link(path: Path, file: TokenSection, vocab_size: int, progress: Progress) -> None:
    """Check a token file's tokens and put it at a path without a copy, if the file system can."""
    for _ in file.blocks(vocab_size, progress):
        pass
    source = file.path.resolve()
    disk.copy(source, path, link=True)
    if path.samefile(source):
        log.info("%s is a hard link, not a copy: replace the file, don't change it", file.path)


def _write(
    path: Path,
    parts: Sequence[TokenSection],
    vocab_size: int,
    texts: Texts | None,
    progress: Progress,
) -> None:
    with TokenWriter(path, token_dtype(vocab_size), texts) as writer:
        for part in parts:
            for block in part.blocks(vocab_size, progress):
                writer.append(block)
