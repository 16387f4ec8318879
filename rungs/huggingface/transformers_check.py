"""Compare an imported model with transformers, hidden state by hidden state."""

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rungs.checkpointing import load
from rungs.checkpointing.weights_file import WEIGHTS_FILE, Weights
from rungs.common.errors import RunFailure, UserError
from rungs.config.model_config import ModelConfig
from rungs.model.gpt import GPT

TOLERANCE = 1e-4
"""Largest difference of a token's vector, relative to its norm. Rounding gave 4e-6 in a Llama of
1.1B parameters; tanh GELU instead of exact GELU gives 2e-4, other mistakes far more."""
_FORWARD = Path(__file__).with_name("transformers_forward.py")
MIN_TOKENS, MAX_TOKENS = 64, 1040
"""Tokens to compare: more than the sliding window, if `MAX_TOKENS` allows."""


class DivergenceError(Exception):
    """The import computes something else than transformers. The message says from where on."""


class Activations(NamedTuple):
    """A model's hidden states and logits for one sequence, in float32."""

    hidden_states: list[np.ndarray]
    """x_SD of the embedding, then of each block; the last one after the final norm."""
    logits_SV: np.ndarray


def require_transformers(python: str) -> None:
    """Raise UserError if a Python lacks transformers or PyTorch."""
    probe = [python, "-c", "import torch, transformers"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--python {python}: cannot be started: {error.strerror}") from None
    if done.returncode:
        cause = (done.stderr.strip() or "it was killed").splitlines()[-1]
        raise UserError(
            "--check needs a Python with PyTorch and transformers, which"
            f" {python} doesn't have ({cause}); name one with --python, or install them (CPU: about"
            " 200 MB to download; with CUDA, the default on Linux, 3 GB): uv pip install"
            " --torch-backend cpu torch transformers"
        )


def compare(source: Path, imported: Path, python: str, echo: Callable[[str], None]) -> None:
    """Compare a Hugging Face model with its import, in float32, with one at a time in memory.
    `python` has PyTorch and transformers. Raises RunFailure if transformers can't run it,
    DivergenceError, which names the first differing hidden state, if the results differ."""
    tokens_S = sample_tokens(Weights(imported / WEIGHTS_FILE).header.model)
    expected = _transformers_activations(source, tokens_S, python)
    found = _rungs_activations(imported, tokens_S)
    errors = relative_errors(found, expected)
    echo(f"compared with transformers on {len(tokens_S)} tokens; largest relative difference:")
    for name, error in errors.items():
        echo(f"  {name:12} {error:.1e}" + "  diverges" * (not error <= TOLERANCE))
    first = next((name for name, error in errors.items() if not error <= TOLERANCE), None)
    if first is not None:
        raise DivergenceError(f"diverges from transformers at {first} ({errors[first]:.1e})")
    echo(f"agrees with transformers: no difference is above {TOLERANCE:g}")


def relative_errors(found: Activations, expected: Activations) -> dict[str, float]:
    """Return the largest error of a vector, relative to its norm, per hidden state and logits."""
    pairs = list(zip(found.hidden_states, expected.hidden_states, strict=True))
    names = ["embedding", *(f"block {number}" for number in range(len(pairs) - 1))]
    errors = {name: _error(*pair) for name, pair in zip(names, pairs, strict=True)}
    return errors | {"logits": _error(found.logits_SV, expected.logits_SV)}


def sample_tokens(model: ModelConfig) -> np.ndarray:
    """Return random token ids for the comparison, tokens_S."""
    window = model.sliding_window or 0
    wanted = window + 16 if window + 16 <= MAX_TOKENS else MIN_TOKENS
    length = min(max(wanted, MIN_TOKENS), model.context_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=length, dtype=np.int32)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    norms = np.linalg.norm(expected, axis=-1)
    return float(np.max(np.linalg.norm(found - expected, axis=-1) / np.maximum(norms, 1e-30)))


def _rungs_activations(folder: Path, tokens_S: np.ndarray) -> Activations:
    with jax.default_matmul_precision("highest"):  # accelerators may round float32 inputs
        result = forward(load.load_model(folder), jnp.asarray(tokens_S)[None])
    assert result.hidden_states is not None
    states = [np.asarray(x_BSD[0], np.float32) for x_BSD in result.hidden_states]
    return Activations(states, np.asarray(result.logits_BSV[0]))


@nnx.jit
def forward(model: GPT, tokens_BS: Any) -> Any:
    return model.forward(tokens_BS, keep_hidden_states=True)


def _transformers_activations(source: Path, tokens_S: np.ndarray, python: str) -> Activations:
    with tempfile.TemporaryDirectory() as folder:
        tokens, result = Path(folder, "tokens.npy"), Path(folder, "result.npz")
        np.save(tokens, tokens_S)
        command = [python, str(_FORWARD), str(source.resolve()), str(tokens), str(result)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            cause = (done.stderr.strip() or "killed, perhaps for lack of memory").splitlines()[-1]
            raise RunFailure(f"could not be checked, because transformers failed: {cause}")
        with np.load(result) as arrays:
            return Activations(list(arrays["hidden_states"]), arrays["logits"])
