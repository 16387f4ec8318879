"""Compare the tensors in a model's files with those that its family expects."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rungs.checkpointing.tensor_writer import SAFETENSORS_DTYPES, TensorSpec
from rungs.common.errors import UserError
from rungs.common.strict_json import format_name
from rungs.huggingface.families.family import Family
from rungs.huggingface.tensors.reader import Tensors
from rungs.huggingface.tensors.rules import AbstractParameter, Rule

HEAD = "lm_head.weight"
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_MAX_LINES = 20


class Match(NamedTuple):
    """Which tensors become parameters."""

    names: dict[str, str]
    """For each name that the family uses, the name in the files."""
    specs: dict[str, TensorSpec]
    """For each Rungs parameter, its shape and the dtype it has in the files."""
    notes: list[str]
    """What was left out or renamed."""


def match(
    folder: Path,
    tensors: Tensors,
    family: Family,
    rules: list[Rule],
    parameters: dict[str, AbstractParameter],
) -> Match:
    """Find the tensors for all parameters.

    Args:
        rules: those that the model needs.
        parameters: those of the model, by name.

    Raises:
        UserError: with a line for each tensor that is missing, unknown, or has the wrong shape or
            dtype.
    """
    names, notes = _names_of_family(tensors, family)
    head_is_tied = not any("head.kernel" in rule.parameters for rule in rules)
    if head_is_tied and HEAD in names:
        embedding = next(r for r in rules if r.parameters == ("token_embedding.embedding",))
        _check_tied_head(folder, tensors, names[HEAD], names.get(embedding.hf_name))
        notes.append(f"left out: {names.pop(HEAD)} (a copy of the embedding it is tied to)")
    lines = [
        *_wrong_tensors(tensors, names, rules, parameters),
        *_mixed_dtypes(tensors, names, rules, parameters),
    ]
    if lines:
        rest = [f"… and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        lines = [f"tensor {line}" for line in lines[:_MAX_LINES]] + rest
        raise UserError.at(folder, lines)
    specs = {
        name: TensorSpec(tensors.specs[names[first]].dtype, parameters[name].shape)
        for rule in rules
        for _, first in [next(rule.hf_names(parameters[rule.parameters[0]]))]
        for name in rule.parameters
    }
    return Match(names, specs, notes)


def _names_of_family(tensors: Tensors, family: Family) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that may be parameters by the family's names, and notes on the rest."""
    names: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    has_vision = any(_VISION.match(name) for name in tensors.specs)
    for name in tensors.specs:
        if has_vision and _VISION.match(name):
            left_out["the vision tower and its projector"] += 1
            continue
        plain = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
        buffer = next((what for end, what in family.buffers if re.search(end + "$", name)), None)
        if buffer:
            left_out[buffer] += 1
        else:
            names[plain if has_vision else name] = name
    notes = [
        f"left out: {count} tensor{'s' * (count > 1)} ({what})" for what, count in left_out.items()
    ]
    if names and not any(name.startswith(family.prefix) for name in names):
        notes.append(f"added the prefix {family.prefix} to the names of all tensors")
        names = {name if name == HEAD else family.prefix + name: names[name] for name in names}
    return names, notes


def _check_tied_head(folder: Path, tensors: Tensors, head: str, embedding: str | None) -> None:
    """Raise UserError if the head differs from the embedding that `config.json` ties it to."""
    if embedding is None:
        return
    same_spec = tensors.specs[head] == tensors.specs[embedding]
    if not same_spec or not np.array_equal(tensors.bits(head), tensors.bits(embedding)):
        raise UserError(
            f"{folder}: tensor {head}: differs from {embedding}, though config.json ties them"
            " (tie_word_embeddings)"
        )


def _wrong_tensors(
    tensors: Tensors,
    names: dict[str, str],
    rules: list[Rule],
    parameters: dict[str, AbstractParameter],
) -> Iterator[str]:
    """Yield a line for each tensor that is missing, unknown, or has the wrong shape or dtype."""
    expected: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        of_rule = [parameters[name] for name in rule.parameters]
        shape = rule.shape(of_rule)
        expected |= {name: shape for _, name in rule.hf_names(of_rule[0])}
    yield from (f"{name}: missing" for name in expected if name not in names)
    yield from (f"{format_name(names[name])}: unknown" for name in names if name not in expected)
    for name in expected.keys() & names.keys():
        spec = tensors.specs[names[name]]
        if spec.shape != expected[name]:
            yield f"{names[name]}: has shape {spec.shape}, must have {expected[name]}"
        if spec.dtype not in SAFETENSORS_DTYPES:
            supported = ", ".join(SAFETENSORS_DTYPES)
            yield f"{names[name]}: has dtype {spec.dtype}; supported are {supported}"


def _mixed_dtypes(
    tensors: Tensors,
    names: dict[str, str],
    rules: list[Rule],
    parameters: dict[str, AbstractParameter],
) -> Iterator[str]:
    """Yield a line for each tensor that does not have the same dtype in all layers."""
    for rule in rules:
        hf_names = rule.hf_names(parameters[rule.parameters[0]])
        found = [names[name] for _, name in hf_names if name in names]
        dtypes = {name: tensors.specs[name].dtype for name in found}
        other = next((name for name in found if dtypes[name] != dtypes[found[0]]), None)
        if other:
            yield (
                f"{other}: is {dtypes[other]}, but {found[0]} is {dtypes[found[0]]}; all layers"
                " must have one dtype"
            )
