"""The tokenizer files of an imported or exported model."""

import json
import shutil
from pathlib import Path
from typing import Any

from rungs.checkpointing import load, published, weights_file
from rungs.common import errors
from rungs.data.text import tokenizer_files
from rungs.data.text.chat_template import TEMPLATE_FILE, ChatTemplate
from rungs.data.text.tokenizer import TOKENIZER_FILE, Tokenizer

_VOCABULARIES = (
    TOKENIZER_FILE,
    tokenizer_files.SENTENCEPIECE_FILE,
    tokenizer_files.VOCABULARY_FILE,
)
TokenIds = dict[str, int | None]


# Import


def convert_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """Write `tokenizer.json` into a folder with tokenizer files of another kind. Returns notes on
    the conversion, with a warning if the tokenizer has more tokens than the model's `vocab_size`.
    Raises UserError if the files are damaged, or of a kind that cannot be converted."""
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return ["the model comes without a tokenizer; prompts and exports will be without one too"]
    tokenizer, notes = tokenizer_files.load_tokenizer(folder), []
    if not (folder / TOKENIZER_FILE).is_file():
        tokenizer.save(folder / TOKENIZER_FILE)
        before = f"{tokenizer_files.VOCABULARY_FILE} and {tokenizer_files.MERGES_FILE}"
        notes.append(f"converted {before} to {TOKENIZER_FILE}")
    if (largest := tokenizer.vocab_size - 1) >= vocab_size:
        notes.append(
            f"warning: the tokenizer has ids up to {largest} ({tokenizer.decode([largest])!r}), but"
            f" the model only {vocab_size} tokens; prompts and datasets with an id from"
            f" {vocab_size} are refused"
        )
    return notes


# Export


def write_tokenizer(
    folder: Path, weights: weights_file.Weights, imported: Path | None
) -> tuple[list[str], TokenIds]:
    """Write a model's tokenizer into a folder, copying the one in `imported` if it is the same.
    Returns notes on missing parts, and the ids of special tokens for `config.json`."""
    header = weights.header
    original = imported / TOKENIZER_FILE if imported else None
    original = original if original and original.is_file() else None
    if header.train is None and not weights.path.with_name(TOKENIZER_FILE).is_file():
        return ["written without a tokenizer: it was imported without"], _token_ids(None)
    notes = []
    try:
        tokenizer = load.load_tokenizer(weights.path)
    except errors.UserError as error:
        if original is None:
            return [f"written without a tokenizer: {error}"], _token_ids(None)
        notes = [f"written with the imported tokenizer, since there is no other: {error}"]
        tokenizer = tokenizer_files.load_tokenizer(original)
    if original and tokenizer_files.load_tokenizer(original).as_json() == tokenizer.as_json():
        for name, path in published.published_files(original.parent).items():
            if name in tokenizer_files.TOKENIZER_FILES:
                shutil.copyfile(path, folder / name)
    else:
        tokenizer.save(folder / TOKENIZER_FILE)
        _write_tokenizer_config(folder, tokenizer, header.model.context_length)
    return notes, _token_ids(tokenizer)


def write_ends(folder: Path, weights: weights_file.Weights) -> None:
    """Write the model's chat template, if it was trained on chats, and make the tokens that ended
    texts in training end generated ones."""
    is_chat = weights.path.with_name(TEMPLATE_FILE).is_file()
    template = ChatTemplate.find(weights.path.parent) if is_chat else None
    if template:
        template.save(folder)
    if weights.header.train is None or not (folder / TOKENIZER_FILE).is_file():
        return
    tokenizer, path = tokenizer_files.load_tokenizer(folder), folder / published.GENERATION_FILE
    own = load.load_tokenizer(weights.path) if weights.tokenizer_file else tokenizer
    ends = published.all_stop_tokens(weights, own, template)
    if not set(ends) <= set(published.stop_tokens(folder, tokenizer)):
        keys = tokenizer_files.json_object(path)
        write_json(path, keys | {"eos_token_id": ends if ends[1:] else ends[0]})


def describe_ends(folder: Path) -> str:
    """Describe the tokens at which an exported model stops, for people to read."""
    if not (folder / TOKENIZER_FILE).is_file():
        return "no known token"
    tokenizer = tokenizer_files.load_tokenizer(folder)
    return tokenizer.names(published.stop_tokens(folder, tokenizer))


def _token_ids(tokenizer: Tokenizer | None) -> TokenIds:
    end = tokenizer.end_of_answer if tokenizer else None
    begin = next(iter(tokenizer.begin), tokenizer.end_of_text) if tokenizer else None
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": None}


def _write_tokenizer_config(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """Write the files that `AutoTokenizer` needs beside `tokenizer.json`."""
    keys = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
    }
    ids = _token_ids(tokenizer)
    for key in ("bos", "eos"):
        if (token := ids[f"{key}_token_id"]) is not None:
            keys[f"{key}_token"] = tokenizer.decode([token])
    write_json(folder / tokenizer_files.CONFIG_FILE, keys)


def write_json(path: Path, values: dict[str, Any], *, sort_keys: bool = False) -> None:
    """Write a JSON file as transformers does, indented by 2."""
    text = json.dumps(values, indent=2, sort_keys=sort_keys) + "\n"
    path.write_text(text, encoding="utf-8")
