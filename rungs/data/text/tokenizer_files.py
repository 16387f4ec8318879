"""Load a tokenizer from a file, a folder or the Hugging Face hub. Read the files beside its
vocabulary, above all `tokenizer_config.json`: which tokens end texts, and what older vocabulary
files lack (`tokenizer.json` is complete). Keys:
https://huggingface.co/docs/transformers/main_classes/tokenizer"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from rungs.common import hub, strict_json
from rungs.common.errors import UserError, errors_at, reason
from rungs.common.run_log import log
from rungs.data.text.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCAB,
    TOKENIZER_FILE,
    TextEnds,
    Tokenizer,
    byte_level_tokenizer,
    library_errors,
    name_in,
)

CONFIG_FILE, ADDED_TOKENS_FILE = "tokenizer_config.json", "added_tokens.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MODEL_CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
END_FILES = (CONFIG_FILE, SPECIAL_TOKENS_FILE, MODEL_CONFIG_FILE, GENERATION_FILE)
"""Files that may name the tokens that end texts."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>")
"""Tokens that end an answer of a chat model but do not separate documents."""
FindFile = Callable[[str], Path | None]
"""Function from a file name to its path; None if the tokenizer has no such file."""
_TOKEN_KEYS = ("lstrip", "rstrip", "single_word", "normalized", "special")
SENTENCEPIECE_FILE, VOCABULARY_FILE, MERGES_FILE = "tokenizer.model", "vocab.json", "merges.txt"
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE),
    *("chat_template.jinja", "chat_template.json"),
    *(SENTENCEPIECE_FILE, VOCABULARY_FILE, MERGES_FILE),
)

_SENTENCEPIECE = (
    f"{{0}}: its tokenizer is a SentencePiece model; convert it, in a Python with transformers:"
    f' AutoTokenizer.from_pretrained("{{0}}").save_pretrained("FOLDER") writes {TOKENIZER_FILE}'
)


def special_tokens(find: FindFile) -> dict[str, str]:
    """Return the special tokens by their names in transformers, such as `eos_token`. As there,
    `special_tokens_map.json` only counts if `tokenizer_config.json` has no added tokens. Raises
    UserError if a file is damaged."""
    keys = json_object(find(CONFIG_FILE))
    if "added_tokens_decoder" not in keys:
        keys |= json_object(find(SPECIAL_TOKENS_FILE))
    named = {key: value for key, value in keys.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def json_object(path: Path | None) -> dict[str, Any]:
    """Return a file's JSON object, empty without a file. Raises UserError for other content."""
    if path is None:
        return {}
    text = strict_json.read_text(path)
    with errors_at(f"{path}: not readable as JSON: ", RecursionError, ValueError):
        keys = json.loads(text)
    if not isinstance(keys, dict):
        raise UserError(f"{path}: not a JSON object")
    return keys


def published_ends(vocabulary: Mapping[str, int], find: FindFile) -> TextEnds | None:
    """Return the tokens that end texts: the tokenizer's `eos_token`, else the model's
    `eos_token_id`; None if no file names either. Raises UserError if a file is damaged."""
    name = special_tokens(find).get("eos_token")
    if name is not None and name in vocabulary:
        return _ends(name, vocabulary, f"the eos_token of {CONFIG_FILE}")
    names = {number: name for name, number in vocabulary.items()}
    for file in (MODEL_CONFIG_FILE, GENERATION_FILE):
        if known := [names[number] for number in eos_token_ids(find(file)) if number in names]:
            return _ends(known[0], vocabulary, f"the eos_token_id of {file}")
    return None


def _ends(name: str, vocabulary: Mapping[str, int], source: str) -> TextEnds:
    separator = name_in(vocabulary) if name in _END_OF_TURN else None
    return TextEnds(vocabulary[separator or name], vocabulary[name], source)


def eos_token_ids(path: Path | None) -> tuple[int, ...]:
    """Return the end-of-text ids in a `config.json` or `generation_config.json`, empty without a
    file. Raises UserError if it is damaged."""
    keys = json_object(path)
    inner = keys.get("text_config")
    eos = keys.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(type(number) is int and 0 <= number < LARGEST_VOCAB for number in ids):
        raise UserError(f"{path}: eos_token_id: must be a token id or a list of token ids")
    return ids


def load_tokenizer(place: Path | str) -> Tokenizer:
    """Load a tokenizer from a folder, a file, or the hub: a string that is neither is a model id
    there. The first of these that exists is used:

    1. `tokenizer.json` 2. `vocab.json` with `merges.txt` (GPT-2's original files), with which
    `tokenizer_config.json` and `added_tokens.json` are read as well

    `published_ends` decides which tokens end texts. Raises UserError if there is no tokenizer, it
    is damaged or of SentencePiece, or the hub cannot be reached."""
    path = Path(place)
    if path.is_dir():
        missing = f"{path}: has no tokenizer: neither {TOKENIZER_FILE}"
    elif _is_hub_id(place):
        missing = f"{place}: has no tokenizer on the Hugging Face hub: neither {TOKENIZER_FILE}"
    else:
        return _from_tokenizer_json(path, finder(path))
    find = finder(place)
    if found := find(TOKENIZER_FILE):
        return _from_tokenizer_json(found, find)
    if (vocabulary := find(VOCABULARY_FILE)) and (merges := find(MERGES_FILE)):
        return _from_gpt2_files(vocabulary, merges, find)
    if find(SENTENCEPIECE_FILE):
        raise UserError(_SENTENCEPIECE.format(place))
    raise UserError(f"{missing} nor {VOCABULARY_FILE} with {MERGES_FILE}")


def finder(place: Path | str) -> FindFile:
    """Return a function that finds a tokenizer's files; `place` is as for `load_tokenizer`."""
    path = Path(place)
    folder = path if path.is_dir() else path.parent

    def on_hub(name: str) -> Path | None:
        with contextlib.suppress(hub.NotOnHub):
            return hub.model_file(str(place), name)
        return None

    def in_folder(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    return on_hub if _is_hub_id(place) else in_folder


def _is_hub_id(place: Path | str) -> bool:
    if isinstance(place, Path) or Path(place).is_dir() or Path(place).is_file():
        return False
    is_file_name = Path(place).suffix.lower() == ".model" or ".json" in place.lower()
    return place.count("/") <= 1 and not place.startswith((".", "/")) and not is_file_name


def _from_tokenizer_json(path: Path, find: FindFile) -> Tokenizer:
    if path.suffix.lower() == ".model":
        raise UserError(_SENTENCEPIECE.format(path.parent))
    text = strict_json.read_text(path)
    with library_errors(f"{path}: not a tokenizer file"):
        raw = tokenizers.Tokenizer.from_str(text)
    return _checked(raw, path, find)


def _checked(raw: tokenizers.Tokenizer, path: Path, find: FindFile) -> Tokenizer:
    """Return a tokenizer from a file, with the tokens that end texts. Raises UserError if its
    template can't be followed."""

    def find_if_reachable(name: str) -> Path | None:  # without a network, it may not be cached
        try:
            return find(name)
        except UserError as error:
            log.warning("%s; what ends a text is decided without it", error)
            return None

    ends = published_ends(raw.get_vocab(with_added_tokens=True), find_if_reachable)
    with errors_at(f"{path}: "):
        return Tokenizer(raw, ends)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a folder, for `load_tokenizer`."""
    tokenizer.save(folder / TOKENIZER_FILE)
    for name, content in _files_beside(tokenizer).items():
        (folder / name).write_bytes(content)


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return a `tokenizer.json` and the files that a copy needs beside it, by name."""
    is_alone = not any(map(finder(path), END_FILES))
    beside = {} if is_alone else _files_beside(load_tokenizer(path))
    return {TOKENIZER_FILE: path.read_bytes()} | beside


def _files_beside(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the file that names the token that ends an answer, if one is needed."""
    if tokenizer.eos_token is None:
        return {}
    text = json.dumps({"eos_token": tokenizer.eos_token}, indent=2) + "\n"
    return {CONFIG_FILE: text.encode()}


def _from_gpt2_files(vocabulary: Path, merges: Path, find: FindFile) -> Tokenizer:
    config = json_object(find(CONFIG_FILE))
    kind = config.get("tokenizer_class")
    if kind not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise UserError(
            f"{vocabulary}: belongs to a {kind}, which does not split text like GPT-2; get the"
            f" model's {TOKENIZER_FILE}, which transformers writes"
        )
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
        raw = byte_level_tokenizer(model, add_prefix_space=bool(config.get("add_prefix_space")))
        if missing := set(pre_tokenizers.ByteLevel.alphabet()) - raw.get_vocab().keys():
            raise ValueError(f"it lacks {len(missing)} of the 256 bytes")
        if raw.token_to_id(END_OF_TEXT) is not None:
            raw.add_special_tokens([END_OF_TEXT])
        _add_tokens(raw, config, find)
        _add_template(raw, config, find)
    except Exception as error:  # the library raises no narrower type
        raise UserError(
            f"{vocabulary}, {merges.name}: not the vocabulary and merges of a GPT-2 tokenizer:"
            f" {reason(error)}; download both again"
        ) from None
    return _checked(raw, vocabulary, find)


def _add_tokens(raw: tokenizers.Tokenizer, config: dict[str, Any], find: FindFile) -> None:
    """Add the tokens that the vocabulary lacks, and make texts match all of them. Raises ValueError
    if another token has a token's id, or a smaller id is unused."""
    tokens = {
        number: AddedToken(content, special=True)
        for content, number in json_object(find(ADDED_TOKENS_FILE)).items()
    }
    for number, keys in config.get("added_tokens_decoder", {}).items():
        flags = {key: keys[key] for key in _TOKEN_KEYS if key in keys}
        tokens[int(number)] = AddedToken(keys["content"], **flags)
    for number, token in sorted(tokens.items(), key=lambda item: item[0]):
        raw.add_tokens([token])
        if (found := raw.token_to_id(token.content)) != number:
            raise ValueError(f"{token.content!r} gets id {found}, not {number}")


def _add_template(raw: tokenizers.Tokenizer, config: dict[str, Any], find: FindFile) -> None:
    """Make the tokenizer add begin and end of text if the keys say so."""
    vocabulary = raw.get_vocab(with_added_tokens=True)
    named = special_tokens(find)

    def token(name: str) -> list[str]:
        known = [token for token in (named.get(name), END_OF_TEXT) if token in vocabulary]
        return known[:1] if config.get(f"add_{name}") else []

    begin, end = token("bos_token"), token("eos_token")
    if special := {*begin, *end}:
        raw.post_processor = processors.TemplateProcessing(
            [*begin, "$A", *end], special_tokens=[(token, vocabulary[token]) for token in special]
        )
