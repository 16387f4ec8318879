"""The tokenizer files of an imported or exported model."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rungs.checkpointing import load
from rungs.checkpointing.published import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILES,
    all_stop_tokens,
    published_files,
    stop_tokens,
)
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.common.strict_json import read_text
from rungs.data.chats.chat_template import TEMPLATE_FILE, ChatTemplate
from rungs.data.tokenizer import TOKENIZER_FILE, Tokenizer
from rungs.data.tokenizer_config import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from rungs.data.tokenizer_config import json_object
from rungs.data.tokenizer_files import (
    MERGES_FILE,
    SENTENCEPIECE_FILE,
    VOCABULARY_FILE,
    load_tokenizer,
)

_VOCABULARIES = (TOKENIZER_FILE, SENTENCEPIECE_FILE, VOCABULARY_FILE)

TokenIds = dict[str, int | None]


# Import


def convert_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """Write `tokenizer.json` into a folder that has tokenizer files of another kind.

    Args:
        vocab_size: the model's number of tokens.

    Returns:
        Notes on what was done, and a warning if the tokenizer has more tokens than the model.

    Raises:
        UserError: the files are damaged, or of a kind that cannot be converted.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return ["the model comes without a tokenizer; prompts and exports will be without one too"]
    tokenizer = load_tokenizer(folder)
    return [*_write_tokenizer_json(folder, tokenizer), *_size_warnings(tokenizer, vocab_size)]


def _write_tokenizer_json(folder: Path, tokenizer: Tokenizer) -> list[str]:
    if (folder / TOKENIZER_FILE).is_file():
        return []
    tokenizer.save(folder / TOKENIZER_FILE)
    if not (folder / SENTENCEPIECE_FILE).is_file():
        return [f"converted {VOCABULARY_FILE} and {MERGES_FILE} to {TOKENIZER_FILE}"]
    _use_tokenizer_json(folder)
    return [f"converted {SENTENCEPIECE_FILE} to {TOKENIZER_FILE}; see {TOKENIZER_CONFIG_FILE}"]


def _size_warnings(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    largest = tokenizer.vocab_size - 1
    if largest < vocab_size:
        return []
    return [
        f"warning: the tokenizer has ids up to {largest} ({tokenizer.decode([largest])!r}), but the"
        f" model only {vocab_size} tokens; prompts and datasets with an id from {vocab_size} are"
        " refused"
    ]


def _use_tokenizer_json(folder: Path) -> None:
    """Make transformers load `tokenizer.json` unchanged. Its classes for SentencePiece would build
    their own pipeline, which for OpenLLaMA gives other tokens."""
    path = folder / TOKENIZER_CONFIG_FILE
    published = json.loads(read_text(path)) if path.is_file() else {}
    content = json.loads(read_text(folder / TOKENIZER_FILE))
    config = json.loads(read_text(folder / CONFIG_FILE))
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    special: dict[str, Any] = {
        "bos_token": names.get(_first_id(config.get("bos_token_id"))),
        "eos_token": names.get(_first_id(config.get("eos_token_id"))),
        "unk_token": content["model"].get("unk_token"),
    }
    known = {key: name for key, name in special.items() if name is not None}
    write_json(path, known | published | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _first_id(ids: Any) -> int | None:
    """Return an id, or the first of a list."""
    first = next(iter(ids), None) if isinstance(ids, list) else ids
    return first if isinstance(first, int) else None


# Export


def write_tokenizer(
    folder: Path, weights: Weights, imported: Path | None
) -> tuple[list[str], TokenIds]:
    """Write a model's tokenizer into a folder.

    Args:
        imported: the folder with the files that were imported with the model, if it was imported.

    Returns:
        Notes on what is missing, and the ids of special tokens for `config.json`.
    """
    header = weights.header
    published = imported / TOKENIZER_FILE if imported else None
    if published is not None and not published.is_file():
        published = None
    if header.train is None and not weights.path.with_name(TOKENIZER_FILE).is_file():
        return ["written without a tokenizer: it was imported without"], _token_ids(None)
    notes = []
    try:
        tokenizer = load.load_tokenizer(weights.path)
    except UserError as error:
        if published is None:
            return [f"written without a tokenizer: {error}"], _token_ids(None)
        notes = [f"written with the imported tokenizer, since there is no other: {error}"]
        tokenizer = load_tokenizer(published)
    if published is not None and _is_same(published, tokenizer):
        for name, path in published_files(published.parent).items():
            if name in TOKENIZER_FILES:
                shutil.copyfile(path, folder / name)
    else:
        tokenizer.save(folder / TOKENIZER_FILE)
        _write_tokenizer_config(folder, tokenizer, header.model.context_length)
    return notes, _token_ids(tokenizer)


def write_ends(folder: Path, weights: Weights) -> None:
    """Write the template of the chats that a model was trained on, if it was, and make what ended
    its texts in training end those that it generates."""
    is_chat = is_file(weights.path.with_name(TEMPLATE_FILE))
    template = ChatTemplate.find(weights.path.parent) if is_chat else None
    if template:
        template.save(folder)
    if weights.header.train is None or not is_file(folder / TOKENIZER_FILE):
        return
    tokenizer, path = load_tokenizer(folder), folder / GENERATION_FILE
    own = load.load_tokenizer(weights.path) if weights.tokenizer_file else tokenizer
    ends = all_stop_tokens(weights, own, template)
    if not set(ends) <= set(stop_tokens(folder, tokenizer)):
        write_json(path, json_object(path) | {"eos_token_id": ends if ends[1:] else ends[0]})


def describe_ends(folder: Path) -> str:
    """Return the tokens at which an exported model stops, for people to read."""
    if not is_file(folder / TOKENIZER_FILE):
        return "no known token"
    tokenizer = load_tokenizer(folder)
    return tokenizer.names(stop_tokens(folder, tokenizer))


def _token_ids(tokenizer: Tokenizer | None) -> TokenIds:
    end = tokenizer.end_of_answer if tokenizer else None
    begin = next(iter(tokenizer.begin), end) if tokenizer else None
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None}


def _write_tokenizer_config(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """Write what `AutoTokenizer` needs beside `tokenizer.json`."""
    keys = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    ids = _token_ids(tokenizer)
    for key in ("bos", "eos"):
        if (token := ids[f"{key}_token_id"]) is not None:
            keys[f"{key}_token"] = tokenizer.decode([token])
    write_json(folder / TOKENIZER_CONFIG_FILE, keys)


def write_json(path: Path, values: dict[str, Any], *, sort_keys: bool = False) -> None:
    """Write a JSON file as transformers does, with an indent of 2."""
    text = json.dumps(values, indent=2, sort_keys=sort_keys) + "\n"
    path.write_text(text, encoding="utf-8")


def _is_same(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether a file holds this tokenizer, however it is formatted."""
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "one.json", Path(folder) / "other.json"
        load_tokenizer(path).save(one)
        tokenizer.save(other)
        return one.read_bytes() == other.read_bytes()
