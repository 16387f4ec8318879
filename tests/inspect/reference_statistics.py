"""What layers do, recomputed in float64 NumPy: from the second decoder, sequence by sequence."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rungs.config.model_config import ModelConfig
from rungs.run.layer_record import SINGULAR_VALUE
from tests.support import reference_gpt
from tests.support.reference_gpt import Floats, Weights, hidden_units, softmax

Numbers = dict[str, Any]


class Recorder:
    """Records what passes through a layer's parts, for every sequence."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.outputs: dict[str, list[list[Floats]]] = {"attention": [], "feed_forward": []}
        self.entropies: list[list[Floats]] = []
        self.logits: list[list[Floats]] = []
        self.hidden: list[list[Floats]] = []

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch, starts: Any) -> Iterator[None]:
        """Record one sequence's layers, whose documents start at `starts` (S,)."""
        for lists in (*self.outputs.values(), self.entropies, self.logits, self.hidden):
            lists.append([])
        whole = {
            name: getattr(reference_gpt, name)
            for name in ("self_attention", "feed_forward", "experts", "attention")
        }

        def self_attention(*args: Any) -> Floats:
            y: Floats = whole["self_attention"](*args)
            self.outputs["attention"][-1].append(y)
            return y

        def attention(
            query: Any, key: Any, value: Any, mask: Any, scale: Any, cap: Any, sinks: Any
        ) -> Floats:
            if starts is not None:
                mask = mask & (np.arange(len(query)) >= starts[:, None])
            self._record_scores(query, key, mask, scale, cap, sinks)
            y: Floats = whole["attention"](query, key, value, mask, scale, cap, sinks)
            return y

        def feed_forward(config: ModelConfig, layer: Weights, x: Floats) -> Floats:
            y: Floats = whole["feed_forward"](config, layer, x)
            if config.n_experts is None:
                self.outputs["feed_forward"][-1].append(y)
                self.hidden[-1].append(hidden_units(config, layer, x))
            return y

        def experts(*args: Any) -> Floats:
            y: Floats = whole["experts"](*args)
            self.outputs["feed_forward"][-1].append(y)
            return y

        with monkeypatch.context() as patched:
            for function in (self_attention, attention, feed_forward, experts):
                patched.setattr(reference_gpt, function.__name__, function)
            yield

    def _record_scores(
        self, query: Any, key: Any, mask: Any, scale: float, cap: Any, sinks: Any
    ) -> None:
        length, heads, _ = query.shape
        sharing = heads // key.shape[1]
        entropies, logits = np.zeros((length, heads)), np.zeros((length, heads))
        for s, n in np.ndindex(length, heads):
            scores = reference_gpt.soft_cap(key[:, n // sharing] @ query[s, n] * scale, cap)
            seen = scores[mask[s]] if sinks is None else np.append(scores[mask[s]], sinks[n])
            shares = softmax(seen)
            entropies[s, n] = -sum(p * math.log(p) for p in shares if p)
            logits[s, n] = seen.max()
        self.entropies[-1].append(entropies.mean(axis=0))
        self.logits[-1].append(logits.max(axis=0))


def activations(
    config: ModelConfig,
    weights: Weights,
    inputs_BS: NDArray[np.int32],
    starts_BS: NDArray[np.int32] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Numbers:
    """Return the statistics of activations of these sequences."""
    recorder, states = Recorder(config), []
    embeddings: list[Floats] = []
    for row, tokens in enumerate(inputs_BS):
        starts = None if starts_BS is None else starts_BS[row]
        with recorder.recording(monkeypatch, starts):
            embedding, *blocks = without_final_norm(config, weights, tokens, monkeypatch)
        embeddings.append(embedding)
        states.append(blocks)
    found: Numbers = {
        "activations": {
            "embedding": sizes([[x] for x in embeddings]),
            "residual": sizes(states),
            "attention_output": sizes(recorder.outputs["attention"]),
        },
        "heads": {
            "entropy": np.mean(recorder.entropies, axis=0),
            "largest_logit": np.max(recorder.logits, axis=0),
        },
    }
    if config.feed_forward == "none":
        return found
    found["activations"]["feed_forward_output"] = sizes(recorder.outputs["feed_forward"])
    if config.n_experts is None:
        hidden_BLSF = np.array(recorder.hidden)
        rms_L = np.sqrt((hidden_BLSF**2).mean(axis=(0, 2, 3)))
        is_dead = np.abs(hidden_BLSF).max(axis=(0, 2)) < 0.01 * rms_L[:, None]
        found["dead_units"] = is_dead.mean(axis=1)
    return found


def without_final_norm(
    config: ModelConfig, weights: Weights, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> list[Floats]:
    """Return the embedding and the residual stream after each block."""
    every_norm = reference_gpt.norm

    def norm(config: ModelConfig, weights: Weights, name: str, x: Floats) -> Floats:
        return x if name == "final_norm" else every_norm(config, weights, name, x)

    with monkeypatch.context() as patched:
        patched.setattr(reference_gpt, "norm", norm)
        return reference_gpt.forward(config, weights, tokens)[:-1]


def sizes(found: list[list[Floats]]) -> Numbers:
    """Return the size of each layer's arrays; `found` is by sequence, then by layer."""
    arrays_BLSD = np.array(found)
    return {
        "rms": np.sqrt((arrays_BLSD**2).mean(axis=(0, 2, 3))),
        "largest": np.abs(arrays_BLSD).max(axis=(0, 2, 3)),
    }


def arrays(
    before: Weights, gradient: Weights, after: Weights, inputs: dict[str, int]
) -> dict[str, Numbers]:
    """Return the statistics of trained arrays by dotted name. `inputs` has the number of input axes
    of each kernel whose largest singular value is recorded."""
    found: dict[str, Numbers] = {}
    kinds = {"weight_rms": before, "gradient_rms": gradient}
    kinds["update_rms"] = {name: after[name] - before[name] for name in before}
    for name, array in before.items():
        in_blocks = name.startswith("blocks.")
        layers = len(array) if in_blocks else 1
        own = {
            kind: np.sqrt((of[name].reshape(layers, -1) ** 2).mean(axis=1))
            for kind, of in kinds.items()
        }
        if name in inputs:
            width = math.prod(array.shape[1 : 1 + inputs[name]])
            values = np.linalg.svd(array.reshape(layers, width, -1), compute_uv=False)
            own[SINGULAR_VALUE] = values[:, 0]
        found[name.removeprefix("blocks.")] = own
    blocks = [name for name in before if name.startswith("blocks.")]
    flat = {
        kind: np.concatenate([of[name].reshape(len(of[name]), -1) for name in blocks], axis=1)
        for kind, of in kinds.items()
    }
    found["all"] = {kind: np.sqrt((array**2).mean(axis=1)) for kind, array in flat.items()}
    return found
