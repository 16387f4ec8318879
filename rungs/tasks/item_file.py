"""Items from JSON lines: `{"prompt": …, "answer": …}`, optionally with `info` and `verifier`."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.config.reinforce_config import VERIFIERS, BuiltInVerifier, TaskConfig
from rungs.tasks import math_verifier
from rungs.tasks.built_in_verifiers import BUILT_IN, MARK
from rungs.tasks.task import Item, Task

Text = Annotated[str, Field(min_length=1)]


class ItemLine(strict_json.StrictModel):
    """One line of a file."""

    prompt: Text
    answer: Text
    info: dict[str, Any] = Field(default={})
    verifier: BuiltInVerifier | None = None


class ItemFile(NamedTuple):
    """The items of a file."""

    path: Path
    items: list[Item]
    lines: dict[str, int]
    """First line of each prompt, from 1."""
    sha256: str


def open_task(config: TaskConfig, run_folder: Path) -> Task:
    """Return the task of a file of items. Raises UserError if there are too few, or for a line that
    is not an item, lacks what its verifier needs, or is both trained on and held out."""
    judge = config.verifier or config.environment
    source = read(run_folder / config.source, judge)
    if config.validation_source is None:
        train, validation = _split(source, config.validation_items)
        checksums = {config.source: source.sha256}
    else:
        held_out = read(run_folder / config.validation_source, judge)
        for prompt, number in held_out.lines.items():
            if line := source.lines.get(prompt):
                raise UserError(
                    f"{held_out.path}:{number}: its prompt is also in {source.path}:{line}; remove"
                    " one of the two"
                )
        train, validation = source.items, held_out.items[: config.validation_items]
        checksums = {config.source: source.sha256, config.validation_source: held_out.sha256}
    return Task(
        name=Path(config.source).stem,
        train=train[: config.train_items],
        validation=validation,
        verifier="exact",
        worked=gold_text,
        short=gold_text,
        sha256=checksums,
    )


def gold_text(item: Item) -> str:
    """Return an item's answer as its verifier expects it in a completion."""
    if item.verifier == math_verifier.NAME:
        return f"\\boxed{{{item.answer.strip().strip('$')}}}"
    needs_mark = item.verifier == "gsm8k" and MARK not in item.answer
    return f"{MARK} {item.answer}" if needs_mark else item.answer


def read(path: Path, verifier: str | None) -> ItemFile:
    """Return the items of a file, skipping blank lines. A given `verifier` (or environment)
    overrides the items' own. Raises UserError, which names file and line, for a line that is not an
    item."""
    text = strict_json.read_text(path)
    items: list[Item] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            items.append(_item(line, Path(f"{path}:{number}"), verifier))
            lines.setdefault(items[-1].prompt, number)
    if not items:
        raise UserError(f'{path}: has no items; each line must be {{"prompt": …, "answer": …}}')
    return ItemFile(path, items, lines, hashlib.sha256(text.encode()).hexdigest())


def _item(line: str, place: Path, verifier: str | None) -> Item:
    """Return the item of a line. Raises UserError if it is none."""
    found = strict_json.parse(line, place, ItemLine)
    name = verifier or found.verifier
    if name is None:
        known = ", ".join(VERIFIERS)
        raise UserError(f'{place}: add "verifier" to the task or to each item: {known}')
    item = Item(found.prompt, found.answer, found.info, name if name in VERIFIERS else None)
    if problem := _problem(item):
        raise UserError(f"{place}: {problem}, for the verifier {name}")
    return item


def _problem(item: Item) -> str | None:
    """Return what an item lacks for its verifier, or None."""
    if item.verifier == math_verifier.NAME:
        return math_verifier.problem(item)
    return BUILT_IN[item.verifier].problem(item) if item.verifier else None


def _split(source: ItemFile, count: int) -> tuple[list[Item], list[Item]]:
    """Return the items of all but `count` prompts, and the first item of each of those, chosen by
    the smallest hashes."""
    first = {item.prompt: item for item in reversed(source.items)}
    held_out = dict(sorted(first.items(), key=lambda pair: pair[1].prompt_hash)[:count])
    train = [item for item in source.items if item.prompt not in held_out]
    if not train:
        raise UserError(
            f"{source.path}: has {len(first):,} different prompts, and validation_items {count:,}"
            f" leaves none to train on; at most {len(first) - 1:,}, or give validation_source"
        )
    return train, list(held_out.values())
