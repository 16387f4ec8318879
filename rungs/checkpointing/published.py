"""The files that a model was published with besides its weights: config, tokenizer, chat template.
They are in `checkpoints/imported/` after an import, and copied to `published/` in each checkpoint
of a run that starts from it, so that a checkpoint can be exported alone."""

import contextlib
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import IMPORTED, find_weights
from rungs.checkpointing.manifest import PUBLISHED_FOLDER
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.common.paths import refuse_link_out
from rungs.data.build.chat_dataset import ChatFormat
from rungs.data.text.chat_template import BUILT_IN, ChatTemplate
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tokenizer_files import GENERATION_FILE, TOKENIZER_FILES, eos_token_ids
from rungs.data.text.tokenizer_files import MODEL_CONFIG_FILE as CONFIG_FILE

PUBLISHED_FILES = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES)


def published_folder(weights: Weights) -> Path | None:
    """Return the folder with the files that a model was published with, None if there is none: the
    weights' folder, its `published/`, the run's `imported/`, or the folder of the weights that the
    run started from."""
    header, folder = weights.header, weights.path.parent
    if header.origin is None:
        return None
    for candidate in (folder, folder / PUBLISHED_FOLDER, folder.parent / IMPORTED):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    start = header.train.start_from if header.train else None
    if start not in (None, IMPORTED):
        with contextlib.suppress(UserError):
            return published_folder(Weights(find_weights(str(start))))
    return None


def published_files(folder: Path) -> dict[str, Path]:
    """Return which of `PUBLISHED_FILES` a folder has, by name. Raises UserError if one is a link
    out of the folder, as they are copied and shared."""
    found = {name: folder / name for name in PUBLISHED_FILES if (folder / name).is_file()}
    for path in found.values():
        refuse_link_out(path)
    return found


def read_published(weights: Weights | None) -> dict[str, bytes]:
    """Return the contents of the files that a model was published with, by name."""
    folder = published_folder(weights) if weights else None
    if folder is None:
        return {}
    return {name: path.read_bytes() for name, path in published_files(folder).items()}


def find_chat_template(weights: Path, file: Path | None = None) -> ChatTemplate | None:
    """Return the chat template of a model: `file` if given, else the one beside its weights, with
    which it was trained, else the published one; None if there is none. Raises UserError if it is
    not valid."""
    folders = (weights.parent, published_folder(Weights(weights)))
    found = (ChatTemplate.find(folder, file) for folder in folders if folder)
    return next(filter(None, found), None)


def load_chat_template(weights: Path, file: Path | None = None) -> ChatTemplate:
    """Like `find_chat_template`, but raise UserError if there is none."""
    if template := find_chat_template(weights, file):
        return template
    raise UserError(
        f"{weights}: the model has no chat template; give one with --chat-template FILE, or by"
        f" name ({', '.join(BUILT_IN)}), or train it on a dataset of chats, which has one"
    )


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text of a published model: those in its generation_config.json,
    else in its config.json; empty if neither names any. Raises UserError if one is damaged."""
    for name in (GENERATION_FILE, CONFIG_FILE):
        file = folder / name
        if tokens := eos_token_ids(file if file.is_file() else None):
            return tokens
    return ()


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return `stop_token_ids`, or the tokenizer's if there are none. Raises UserError if a config
    is damaged."""
    return stop_token_ids(folder) or _known(tokenizer.end_of_answer, tokenizer.end_of_text)


def all_stop_tokens(
    weights: Weights, tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a text of a model: those of `stop_tokens`, those it was trained
    with, and in chats the end of a turn in `template`. Raises UserError if a config is damaged."""
    published = stop_tokens(published_folder(weights) or weights.path.parent, tokenizer)
    trained = (tokenizer.end_of_answer, tokenizer.end_of_text) if weights.header.train else ()
    turn = ChatFormat(template, tokenizer).end_of_turn if template else None
    return _known(*published, *trained, turn)


def _known(*tokens: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in tokens if token is not None))
