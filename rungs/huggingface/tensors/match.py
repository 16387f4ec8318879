"""The tensors in a published model's files, matched with those that its family has."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rungs.common.errors import UserError
from rungs.common.strict_json import format_name
from rungs.huggingface.families.family import Family
from rungs.huggingface.tensors.reader import TensorFolder
from rungs.huggingface.tensors.rules import AbstractParameter, Rule
from rungs.huggingface.tensors.writer import CODES, TensorType

HEAD = "lm_head.weight"
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_MOST_LINES = 20


class Match(NamedTuple):
    """Which tensors become parameters."""

    names: dict[str, str]
    """For each name that the family has, the name in the files."""
    types: dict[str, TensorType]
    """Of each of our parameters."""
    notes: list[str]
    """What was left out or renamed."""


def match(
    folder: Path,
    tensors: TensorFolder,
    family: Family,
    rules: list[Rule],
    ours: dict[str, AbstractParameter],
) -> Match:
    """Find every tensor that the parameters need.

    Args:
        rules: those that the model needs.
        ours: its parameters.

    Raises:
        UserError: with a line for each tensor that is missing, unknown, of another shape or type
            than it must be.
    """
    names, notes = _by_family_name(tensors, family)
    head_is_tied = not any("head.kernel" in rule.ours for rule in rules)
    if head_is_tied and HEAD in names:
        embedding = next(rule for rule in rules if rule.ours == ("token_embedding.embedding",))
        _refuse_other_head(folder, tensors, names[HEAD], names.get(embedding.theirs))
        notes.append(f"left out: {names.pop(HEAD)} (the same as the embedding it is tied to)")
    lines = [*_misfits(tensors, names, rules, ours), *_unlike_layers(tensors, names, rules, ours)]
    if lines:
        rest = [f"… and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        shown = [f"tensor {line}" for line in lines[:_MOST_LINES]] + rest
        raise UserError("\n".join(f"{folder}: {line}" for line in shown))
    types = {
        parameter: TensorType(tensors.types[names[first]].dtype, ours[parameter].shape)
        for rule in rules
        for _, first in [next(rule.names(ours[rule.ours[0]]))]
        for parameter in rule.ours
    }
    return Match(names, types, notes)


def _by_family_name(tensors: TensorFolder, family: Family) -> tuple[dict[str, str], list[str]]:
    """The tensors that may be parameters, and what was done to have them."""
    names: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    has_vision = any(_VISION.match(name) for name in tensors.types)
    for name in tensors.types:
        if has_vision and _VISION.match(name):
            left_out["the vision tower and its projector"] += 1
            continue
        plain = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        what = next((what for end, what in family.buffers if re.search(end + "$", name)), None)
        if what:
            left_out[what] += 1
        else:
            names[plain if has_vision else name] = name
    notes = [
        f"left out: {count} tensor{'s' * (count > 1)} ({what})" for what, count in left_out.items()
    ]
    if names and not any(name.startswith(family.prefix) for name in names):
        notes.append(f"read as if their names began with {family.prefix}: all tensors")
        names = {name if name == HEAD else family.prefix + name: names[name] for name in names}
    return names, notes


def _refuse_other_head(
    folder: Path, tensors: TensorFolder, head: str, embedding: str | None
) -> None:
    """Refuse a head that is not the embedding, where config.json says that it is."""
    if embedding is None:
        return
    alike = tensors.types[head] == tensors.types[embedding]
    if not alike or not np.array_equal(tensors.bits(head), tensors.bits(embedding)):
        raise UserError(
            f"{folder}: tensor {head}: differs from {embedding}, though config.json ties them"
            " (tie_word_embeddings)"
        )


def _misfits(
    tensors: TensorFolder,
    names: dict[str, str],
    rules: list[Rule],
    ours: dict[str, AbstractParameter],
) -> Iterator[str]:
    """A line for each tensor that is missing, unknown or of another shape or type."""
    expected: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        parameters = [ours[name] for name in rule.ours]
        shape = rule.shape(parameters)
        expected |= {name: shape for _, name in rule.names(parameters[0])}
    yield from (f"{name}: missing" for name in expected if name not in names)
    yield from (f"{format_name(names[name])}: unknown" for name in names if name not in expected)
    for name in expected.keys() & names.keys():
        found = tensors.types[names[name]]
        if found.shape != expected[name]:
            yield f"{names[name]}: has shape {found.shape}, must have {expected[name]}"
        if found.dtype not in CODES:
            yield f"{names[name]}: is of type {found.dtype}; supported are {', '.join(CODES)}"


def _unlike_layers(
    tensors: TensorFolder,
    names: dict[str, str],
    rules: list[Rule],
    ours: dict[str, AbstractParameter],
) -> Iterator[str]:
    """A line for each tensor whose layers are of several types."""
    for rule in rules:
        found = [names[name] for _, name in rule.names(ours[rule.ours[0]]) if name in names]
        dtypes = {name: tensors.types[name].dtype for name in found}
        other = next((name for name in found if dtypes[name] != dtypes[found[0]]), None)
        if other:
            yield (
                f"{other}: is {dtypes[other]}, but {found[0]} is {dtypes[found[0]]}; all layers"
                " must be of one type"
            )
