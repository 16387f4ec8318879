"""Load a tokenizer from a file, a folder or the Hugging Face hub."""

import contextlib
import json
import logging
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from rungs.common import hub, paths
from rungs.common.errors import UserError, reason
from rungs.data import bpe, tokenizer_config
from rungs.data.sentencepiece_model import SentencePieceModel
from rungs.data.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCAB,
    TOKENIZER_FILE,
    Tokenizer,
    library_errors,
)
from rungs.data.tokenizer_config import CONFIG_FILE, FindFile, TokenizerConfig

logger = logging.getLogger("rungs.dataset")

SENTENCEPIECE_FILE, VOCABULARY_FILE, MERGES_FILE = "tokenizer.model", "vocab.json", "merges.txt"


def load_tokenizer(place: Path | str) -> Tokenizer:
    """Load a tokenizer from a folder, a file, or the hub: a string that is neither is a model id
    there. The first of these that exists is used:

    1. `tokenizer.json` 2. `tokenizer.model` (SentencePiece, as in OpenLLaMA) 3. `vocab.json` with
    `merges.txt` (GPT-2's original files)

    With 2 and 3, `tokenizer_config.json` and `added_tokens.json` are read as well. `published_ends`
    decides which tokens end texts. Raises UserError if there is no tokenizer, it is damaged or
    unsupported, or the hub cannot be reached."""
    path = Path(place)
    if paths.is_folder(path):
        missing = f"{path}: has no tokenizer: neither {TOKENIZER_FILE}"
    elif _is_hub_id(place):
        missing = f"{place}: has no tokenizer on the Hugging Face hub: neither {TOKENIZER_FILE}"
    elif path.suffix == ".model":
        return _from_sentencepiece(path, finder(path))
    else:
        return _from_tokenizer_json(path, finder(path))
    find = finder(place)
    if found := find(TOKENIZER_FILE):
        return _from_tokenizer_json(found, find)
    if found := find(SENTENCEPIECE_FILE):
        return _from_sentencepiece(found, find)
    if (vocabulary := find(VOCABULARY_FILE)) and (merges := find(MERGES_FILE)):
        return _from_gpt2_files(vocabulary, merges, find)
    raise UserError(f"{missing} nor {SENTENCEPIECE_FILE} nor {VOCABULARY_FILE} with {MERGES_FILE}")


def finder(place: Path | str) -> FindFile:
    """Return a function that finds the files beside a tokenizer, or a model's on the hub; `place`
    is as for `load_tokenizer`."""
    path = Path(place)
    folder = path if paths.is_folder(path) else path.parent

    def on_hub(name: str) -> Path | None:
        with contextlib.suppress(hub.NotOnHub):
            return hub.model_file(str(place), name)
        return None

    def in_folder(name: str) -> Path | None:
        return folder / name if paths.is_file(folder / name) else None

    return on_hub if _is_hub_id(place) else in_folder


def _is_hub_id(place: Path | str) -> bool:
    if isinstance(place, Path) or paths.is_folder(Path(place)) or paths.is_file(Path(place)):
        return False
    is_file_name = place.endswith(".model") or ".json" in place
    return place.count("/") <= 1 and not place.startswith((".", "/")) and not is_file_name


def _from_tokenizer_json(path: Path, find: FindFile) -> Tokenizer:
    try:
        paths.require_regular(path)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable tokenizer file: {reason(error)}") from None
    with library_errors(f"{path}: not a tokenizer file"):
        raw = tokenizers.Tokenizer.from_str(text)
    return _checked(raw, path, find)


def _checked(raw: tokenizers.Tokenizer, path: Path, find: FindFile) -> Tokenizer:
    """Return a tokenizer from a file, with the tokens that end texts. Raises UserError if an id is
    too large (the library's time grows with it), or the template uses an id without a token."""
    try:
        tokenizer = Tokenizer(raw)
    except UserError as error:
        raise UserError(f"{path}: {reason(error)}") from None
    if tokenizer.vocab_size > LARGEST_VOCAB:
        raise UserError(
            f"{path}: has the token id {tokenizer.vocab_size - 1}, which is too large; ids must be"
            f" below {LARGEST_VOCAB}"
        )
    added = [*tokenizer.begin, *tokenizer.template_end]
    if max(added, default=0) >= max(tokenizer.vocab_size, 1):
        raise UserError(f"{path}: adds ids to a text that have no token: {added}")

    def find_if_reachable(name: str) -> Path | None:  # without a network, it may not be cached
        try:
            return find(name)
        except UserError as error:
            logger.warning("%s; what ends a text is decided without it", error)
            return None

    vocabulary = raw.get_vocab(with_added_tokens=True)
    return Tokenizer(raw, tokenizer_config.published_ends(vocabulary, find_if_reachable))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a folder, for `load_tokenizer`."""
    tokenizer.save(folder / TOKENIZER_FILE)
    for name, content in _files_beside(tokenizer).items():
        (folder / name).write_bytes(content)


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return a `tokenizer.json` and the files that a copy needs beside it, by name."""
    is_alone = not any(map(finder(path), tokenizer_config.END_FILES))
    beside = {} if is_alone else _files_beside(load_tokenizer(path))
    return {TOKENIZER_FILE: path.read_bytes()} | beside


def _files_beside(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the file that names the token that ends an answer, if one is needed."""
    if tokenizer.eos_token is None:
        return {}
    text = json.dumps({"eos_token": tokenizer.eos_token}, indent=2) + "\n"
    return {CONFIG_FILE: text.encode()}


def _from_sentencepiece(path: Path, find: FindFile) -> Tokenizer:
    config = TokenizerConfig.read(find)
    try:
        paths.require_regular(path)
        model = SentencePieceModel.from_bytes(path.read_bytes())
        if config.add_prefix_space is not None:
            model = model._replace(adds_dummy_prefix=config.add_prefix_space)
        raw = model.to_tokenizer(prefix_after_special_tokens=bool(config.legacy))
        config.add_tokens(raw)
        config.add_template(raw, find, bos=model.bos, eos=model.eos, adds_bos=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises no narrower type
        raise UserError(
            f"{path}: this SentencePiece model cannot be converted: {reason(error)}; download it"
            f" again, or get the model's {TOKENIZER_FILE}, which transformers writes"
        ) from None
    return _checked(raw, path, find)


def _from_gpt2_files(vocabulary: Path, merges: Path, find: FindFile) -> Tokenizer:
    config = TokenizerConfig.read(find)
    if config.tokenizer_class not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise UserError(
            f"{vocabulary}: belongs to a {config.tokenizer_class}, which does not split text like"
            f" GPT-2; get the model's {TOKENIZER_FILE}, which transformers writes"
        )
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
        raw = bpe.byte_level_tokenizer(model, add_prefix_space=bool(config.add_prefix_space))
        if missing := set(pre_tokenizers.ByteLevel.alphabet()) - raw.get_vocab().keys():
            raise ValueError(f"it lacks {len(missing)} of the 256 bytes")
        if raw.token_to_id(END_OF_TEXT) is not None:
            raw.add_special_tokens([END_OF_TEXT])
        config.add_tokens(raw)
        end = END_OF_TEXT if END_OF_TEXT in raw.get_vocab() else None
        config.add_template(raw, find, bos=end, eos=end, adds_bos=False)
    except Exception as error:  # the library raises no narrower type
        raise UserError(
            f"{vocabulary}, {merges.name}: not the vocabulary and merges of a GPT-2 tokenizer:"
            f" {reason(error)}; download both again"
        ) from None
    return _checked(raw, vocabulary, find)
