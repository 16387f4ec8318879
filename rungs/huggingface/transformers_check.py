"""Compare an imported model with transformers, hidden state by hidden state.

Axes as in `rungs/model/gpt.py`.
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
"""Largest difference of a token's vector, relative to its norm. Rounding gave 4e-6 in a Llama of
1.1B parameters. The tanh form of GELU instead of the exact one gives 2e-4, other mistakes far
more."""
MIN_TOKENS, MAX_TOKENS = 64, 1040
"""Tokens to compare: more than the sliding window has, if that is at most `MAX_TOKENS`."""


class DivergenceError(Exception):
    """The import computes something else than transformers. Says from where on."""


class Activations(NamedTuple):
    """What a model computes for one sequence, in float32."""

    hidden_states: list[np.ndarray]
    """x_SD of the embedding, then of each block; the last one after the final norm."""
    logits_SV: np.ndarray


def require_transformers() -> None:
    """Raise UserError if transformers or PyTorch is not installed."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(
            f"--check needs {' and '.join(absent)}; run: uv run --with torch --with transformers"
            " pretrained.py import HUB_ID_OR_FOLDER RUN --check"
        )


def compare(source: Path, imported: Path, echo: Callable[[str], None]) -> None:
    """Compare a Hugging Face model with its import, both in float32, one at a time in memory.

    Raises:
        DivergenceError: a hidden state or the logits differ. Names the first that does.
    """
    expected, tokens_S = _transformers_activations(source, imported)
    found = _rungs_activations(imported, tokens_S)
    errors = relative_errors(found, expected)
    echo(f"compared with transformers on {len(tokens_S)} tokens; largest relative difference:")
    for name, error in errors.items():
        echo(f"  {name:12} {error:.1e}" + "  diverges" * (not error <= TOLERANCE))
    first = next((name for name, error in errors.items() if not error <= TOLERANCE), None)
    if first is not None:
        raise DivergenceError(f"diverges from transformers at {first} ({errors[first]:.1e})")


def relative_errors(found: Activations, expected: Activations) -> dict[str, float]:
    """Return, for each hidden state and the logits, the largest difference of a token's vector
    relative to its norm."""
    pairs = list(zip(found.hidden_states, expected.hidden_states, strict=True))
    names = ["embedding", *(f"block {number}" for number in range(len(pairs) - 1))]
    errors = {name: _error(*pair) for name, pair in zip(names, pairs, strict=True)}
    return errors | {"logits": _error(found.logits_SV, expected.logits_SV)}


def sample_tokens(model: ModelConfig) -> np.ndarray:
    """Return random token ids to compare: tokens_S."""
    window = model.sliding_window or 0
    wanted = window + 16 if window + 16 <= MAX_TOKENS else MIN_TOKENS
    length = min(max(wanted, MIN_TOKENS), model.context_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=length, dtype=np.int32)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    norms = np.linalg.norm(expected, axis=-1)
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, 1e-30)))


def _rungs_activations(folder: Path, tokens_S: np.ndarray) -> Activations:
    with jax.default_matmul_precision("highest"):  # accelerators round float32 otherwise
        result = forward(load_model(folder), jnp.asarray(tokens_S)[None])
    assert result.hidden_states is not None
    states = [np.asarray(x_BSD[0], np.float32) for x_BSD in result.hidden_states]
    return Activations(states, np.asarray(result.logits_BSV[0]))


@nnx.jit
def forward(model: GPT, tokens_BS: Any) -> Any:
    return model.forward(tokens_BS, keep_hidden_states=True)


def _transformers_activations(source: Path, imported: Path) -> tuple[Activations, np.ndarray]:
    """Return the activations of transformers, and the tokens they are for."""
    import torch
    import transformers

    tokens_S = sample_tokens(Weights(imported / WEIGHTS_FILE).header.model)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source, local_files_only=True, **_load_options(torch.float32, transformers.__version__)
    )
    with torch.no_grad():
        tokens = torch.from_numpy(tokens_S.astype(np.int64))[None]
        result = model.eval()(tokens, output_hidden_states=True, use_cache=False)
    states = [x_BSD[0].numpy() for x_BSD in result.hidden_states]
    activations = Activations(states, result.logits[0].float().numpy())
    del model, result
    gc.collect()
    return activations, tokens_S


def _load_options(dtype: Any, version: str) -> dict[str, Any]:
    """Return `from_pretrained` options for this dtype without fused kernels."""
    options = {"attn_implementation": "eager"}
    if int(version.split(".")[0]) < 5:
        return options | {"torch_dtype": dtype}
    # grouped experts fail if the bytes of a row are not a multiple of 16
    return options | {"dtype": dtype, "experts_implementation": "eager"}
