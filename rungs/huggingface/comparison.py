"""An imported model compared with what transformers computes, hidden state by hidden state.

Axes as in `model.py`.
"""

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rungs.checkpointing.load import load_model
from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.model.gpt import GPT

TOLERANCE = 1e-4
"""Of a token's vector, relative to its length. Rounding came to 4e-6 in a Llama of 1.1B parameters;
the tanh form of GELU in place of the exact one makes 2e-4, other slips far more."""
SHORTEST, LONGEST = 64, 1040
"""Tokens that are compared: enough to pass the sliding window, where that is affordable."""


class Diverged(Exception):
    """The two do not compute the same; says from where on."""


class ForwardResult(NamedTuple):
    """What a model computes of a sequence, float32."""

    hidden_states: list[np.ndarray]
    """x_SD of the embedding, then of each block, that of the last one after the final norm."""
    logits_SV: np.ndarray


def find_transformers() -> None:
    """Raises UserError where transformers or PyTorch is not installed."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(
            f"--check needs {' and '.join(absent)}, not installed here; run it as: uv run --with"
            " torch --with transformers pretrained.py import … --check"
        )


def compare(published: Path, imported: Path, say: Callable[[str], None]) -> None:
    """Compare a published model with its import, one after the other in memory, both in float32.

    Raises:
        Diverged: a hidden state or the logits differ; names the first that does.
    """
    theirs, tokens_S = _of_transformers(published, imported)
    ours = _of_rungs(imported, tokens_S)
    errors = relative_errors(ours, theirs)
    say(f"compared with transformers on {len(tokens_S)} tokens; largest difference, relative:")
    for name, error in errors.items():
        say(f"  {name:12} {error:.1e}" + "  diverges" * (not error <= TOLERANCE))
    first = next((name for name, error in errors.items() if not error <= TOLERANCE), None)
    if first is not None:
        raise Diverged(f"diverges from transformers at {first} ({errors[first]:.1e})")


def relative_errors(ours: ForwardResult, theirs: ForwardResult) -> dict[str, float]:
    """The largest difference of any token's vector, relative to its length, by place."""
    pairs = list(zip(ours.hidden_states, theirs.hidden_states, strict=True))
    names = ["embedding", *(f"block {number}" for number in range(len(pairs) - 1))]
    errors = {name: _error(*pair) for name, pair in zip(names, pairs, strict=True)}
    return errors | {"logits": _error(ours.logits_SV, theirs.logits_SV)}


def sample_tokens(model: ModelConfig) -> np.ndarray:
    """Token ids that differ from place to place, as many as are compared: tokens_S."""
    window = model.sliding_window or 0
    wanted = window + 16 if window + 16 <= LONGEST else SHORTEST
    length = min(max(wanted, SHORTEST), model.context_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=length, dtype=np.int32)


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    lengths = np.linalg.norm(theirs, axis=-1)
    return float(np.max(np.linalg.norm(ours - theirs, axis=-1) / np.maximum(lengths, 1e-30)))


def _of_rungs(folder: Path, tokens_S: np.ndarray) -> ForwardResult:
    with jax.default_matmul_precision("highest"):  # accelerators round float32 otherwise
        found = forward(load_model(folder), jnp.asarray(tokens_S)[None])
    assert found.hidden_states is not None
    states = [np.asarray(x_BSD[0], np.float32) for x_BSD in found.hidden_states]
    return ForwardResult(states, np.asarray(found.logits_BSV[0]))


@nnx.jit
def forward(model: GPT, tokens_BS: Any) -> Any:
    return model.forward(tokens_BS, keep_hidden_states=True)


def _of_transformers(published: Path, imported: Path) -> tuple[ForwardResult, np.ndarray]:
    """What transformers computes, and of which tokens."""
    import torch
    import transformers

    tokens_S = sample_tokens(Weights(imported / WEIGHTS_FILE).header.model)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        published, local_files_only=True, **_plain(torch.float32, transformers.__version__)
    )
    with torch.no_grad():
        tokens = torch.from_numpy(tokens_S.astype(np.int64))[None]
        found = model.eval()(tokens, output_hidden_states=True, use_cache=False)
    states = [x_BSD[0].numpy() for x_BSD in found.hidden_states]
    outcome = ForwardResult(states, found.logits[0].float().numpy())
    del model, found
    gc.collect()
    return outcome, tokens_S


def _plain(dtype: Any, version: str) -> dict[str, Any]:
    """How transformers is asked for a type, and for no fused kernels."""
    options = {"attn_implementation": "eager"}
    if int(version.split(".")[0]) < 5:
        return options | {"torch_dtype": dtype}
    # the grouped experts fail where a row is no multiple of 16 bytes
    return options | {"dtype": dtype, "experts_implementation": "eager"}
