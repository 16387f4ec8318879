"""Encodes with transformers: `python transformers_tokenizer.py FOLDER IN.json OUT.json`. Its Python
may lack Rungs. IN has `texts` and `chats`, lists of messages. OUT has their ids: `texts` without
special tokens around them, `whole` with them, and `chats` with the start of an answer, null where
there is no chat template or it refuses the chat. `special` has texts with a special token that the
folder's files name, each with its ids: a class of transformers adds more, as `<mask>` after the
vocabulary, which no model of the folder has learned."""

import json
import sys
from pathlib import Path
from typing import Any

import transformers

NAMING = {".json", ".model", ".txt"}
"""Suffixes of files that name tokens."""


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int] | None:
    """Return the ids of a chat and of the start of an answer."""
    if not tokenizer.chat_template:
        return None
    import jinja2  # not there in every environment with transformers

    try:
        found: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except jinja2.TemplateError:
        return None
    return found


def special_tokens(tokenizer: Any, folder: Path) -> list[str]:
    """Return the special tokens that the folder's files name."""
    files = [path.read_bytes() for path in folder.iterdir() if path.suffix in NAMING]
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
        and any(
            name.encode() in file
            for name in (token.content, json.dumps(token.content)[1:-1])
            for file in files
        )
    ]


def main(folder: str, asked_file: str, target: str) -> None:
    """Write the ids of texts and chats."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    asked = json.loads(Path(asked_file).read_text(encoding="utf-8"))
    special = [f"a {name}b" for name in special_tokens(tokenizer, Path(folder))]

    def plain(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    answers = {
        "texts": [plain(text) for text in asked["texts"]],
        "special": [(text, plain(text)) for text in special],
        "whole": [tokenizer(t)["input_ids"] for t in asked["texts"]],
        "chats": [chat_ids(tokenizer, messages) for messages in asked["chats"]],
    }
    Path(target).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
