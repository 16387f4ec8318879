"""Which trained parameters a gradient does not reach, and which of those need none.

Stacked parameters are taken apart: a layer's slice, an expert's slice, an embedding's row can be
dead by itself. Dead is exactly zero: a small gradient is one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rungs.config.model_config import ModelConfig
from rungs.data.sequences import IGNORED
from rungs.model.lora import DOWN, UP

Arrays = dict[str, np.ndarray]


class ExaminedBatch(NamedTuple):
    """What the gradient is of."""

    inputs_BS: np.ndarray
    targets_BS: np.ndarray
    expert_tokens_LE: np.ndarray | None
    """Tokens that went through each expert; None without experts."""


class Reach(NamedTuple):
    """What a gradient reaches."""

    parts: int
    """How many there are, those that need none left out."""
    dead: list[str]
    """Those that have none."""
    excused: list[str]
    """A line for each kind of parts that need none."""
    least: tuple[float, str]
    """The smallest norm of a part that has one, and which it is."""


class _Part(NamedTuple):
    """What of a parameter can be dead by itself."""

    parameter: str
    gradient: np.ndarray
    layer: int | None = None
    expert: int | None = None
    row: str = ""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        expert = "" if self.expert is None else f", expert {self.expert}"
        return self.parameter + layer + expert + self.row


def reach(model: ModelConfig, gradient: Arrays, parameters: Arrays, batch: ExaminedBatch) -> Reach:
    """What the gradient of a batch reaches.

    Args:
        gradient: of each trained parameter, by dotted name.
        parameters: their values.
    """
    living: list[tuple[float, str]] = []
    dead: list[str] = []
    excused: dict[str, None] = {}
    for name, array in gradient.items():
        for part in _parts(model, name, array, batch):
            if reason := _excuse(model, part, parameters, batch):
                excused[reason] = None
            elif part.gradient.any():
                living.append((float(np.linalg.norm(part.gradient)), str(part)))
            else:
                dead.append(str(part))
    rows = _rows_not_seen(model, gradient, batch)
    parts = len(living) + len(dead)
    return Reach(parts, dead, [*rows, *excused], min(living, default=(0.0, "none")))


def _parts(
    model: ModelConfig, name: str, array: np.ndarray, batch: ExaminedBatch
) -> Iterator[_Part]:
    counts_BS = batch.targets_BS != IGNORED
    if name == "token_embedding.embedding":
        for token in np.unique(batch.inputs_BS[counts_BS]):
            yield _Part(name, array[token], row=f", token {token}")
    elif name == "position_embedding.embedding":
        for position in np.flatnonzero(counts_BS.any(axis=0)):
            yield _Part(name, array[position], row=f", position {position}")
    elif not name.startswith("blocks."):
        yield _Part(name, array)
    elif _is_of_experts(model, name):
        for (layer, expert), own in _places(array):
            yield _Part(name, own, layer, expert)
    else:
        yield from (_Part(name, own, layer) for layer, own in enumerate(array))


def _places(array_LE: np.ndarray) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    for layer, experts in enumerate(array_LE):
        yield from (((layer, expert), own) for expert, own in enumerate(experts))


def _is_of_experts(model: ModelConfig, name: str) -> bool:
    return bool(model.n_experts) and ".feed_forward." in name and ".router." not in name


def _rows_not_seen(model: ModelConfig, gradient: Arrays, batch: ExaminedBatch) -> Iterator[str]:
    """Rows of embeddings that are not in the batch."""
    if "token_embedding.embedding" in gradient and not model.tied_embeddings:
        absent = model.vocab_size - len(np.unique(batch.inputs_BS))
        yield f"{absent:,} of {model.vocab_size:,} tokens do not occur: their embeddings need none"
    length = batch.inputs_BS.shape[-1]
    if "position_embedding.embedding" in gradient and length < model.context_length:
        yield f"positions from {length} on are not examined: their embeddings need none"


def _excuse(
    model: ModelConfig, part: _Part, parameters: Arrays, batch: ExaminedBatch
) -> str | None:
    """Why a part needs no gradient, if it does not."""
    name = part.parameter
    attention = name.partition("blocks.attention.")[2]
    if name.endswith(DOWN) and not parameters[name.removesuffix(DOWN) + UP].any():
        return "A of low-rank additions has none while B is zero, as it is at the start"
    if attention == "key.bias" and _is_shift_of_scores(model):
        return "a bias of all keys shifts all scores alike: softmax does not see it"
    if attention.startswith(("query", "key")) and _sees_one_token(model, part, batch):
        return "attention to a single token has nothing to choose: queries and keys need none"
    if ".router." in name and model.n_experts == 1:
        return "a router with one expert has nothing to choose"
    counts_LE = batch.expert_tokens_LE
    if part.expert is not None and counts_LE is not None and not counts_LE[part.layer, part.expert]:
        return f"no token went to expert {part.expert} of layer {part.layer}"
    return None


def _is_shift_of_scores(model: ModelConfig) -> bool:
    """Whether what is added to all keys adds the same to all of a query's scores."""
    return model.positions != "rope" and not model.qk_norm and model.attention_soft_cap is None


def _sees_one_token(model: ModelConfig, part: _Part, batch: ExaminedBatch) -> bool:
    kind = list(model.layer_kinds())[part.layer or 0]
    return batch.inputs_BS.shape[-1] == 1 or (kind == "sliding" and model.sliding_window == 1)
