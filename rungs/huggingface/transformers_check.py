"""Compare an imported model with transformers, hidden state by hidden state, and its tokenizer."""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rungs.checkpointing import load
from rungs.checkpointing.weights_file import WEIGHTS_FILE, Weights
from rungs.common.errors import RunFailure, UserError
from rungs.common.paths import is_file
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.data.chats.chat_template import ChatTemplate
from rungs.data.tokenizer import TOKENIZER_FILE
from rungs.data.tokenizer_files import load_tokenizer
from rungs.huggingface import tokenizer_check
from rungs.huggingface.agreement import TOLERANCE, Activations, Nearness, nearness, predictions
from rungs.model.gpt import GPT

MIN_TOKENS, MAX_TOKENS = 64, 1040
"""Tokens to compare: more than the sliding window, if `MAX_TOKENS` allows."""


class DivergenceError(Exception):
    """The import computes something else than transformers. The message says from where on."""


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
    """Compare a Hugging Face model with its import: hidden states and logits, in float32, with one
    model at a time in memory, and token ids. `python` has PyTorch and transformers. Raises
    RunFailure if transformers can't run it, DivergenceError, which names the first difference, if
    the results differ."""
    _compare_activations(source, imported, python, echo)
    _compare_tokenizers(source, imported, python, echo)
    echo(f"agrees with transformers: no difference is above {TOLERANCE:g}")


def _compare_activations(
    source: Path, imported: Path, python: str, echo: Callable[[str], None]
) -> None:
    tokens_S = sample_tokens(Weights(imported / WEIGHTS_FILE).header.model)
    expected = _transformers_activations(source, tokens_S, python)
    found = _rungs_activations(imported, tokens_S)
    near = nearness(found, expected)
    rows = [_row(name, each) for name, each in near.items()]
    echo(f"compared with transformers on {len(tokens_S)} tokens:")
    echo(align_columns([("", "largest relative difference", "smallest cosine", ""), *rows]))
    divergence, same, tokens = predictions(found.logits_SV, expected.logits_SV)
    echo(
        f"next token: KL divergence at most {divergence:.1e} nats; the first choice"
        f" agrees after {same} of {tokens} tokens"
    )
    first = next((name for name, each in near.items() if not each.agrees), None)
    if first is not None:
        error = near[first].difference
        raise DivergenceError(f"diverges from transformers at {first} ({error:.1e})")


def _row(name: str, near: Nearness) -> tuple[str, ...]:
    mark = "" if near.agrees else "diverges"
    return f"  {name}", f"{near.difference:.1e}", f"{near.cosine:.9f}", mark


def _compare_tokenizers(
    source: Path, imported: Path, python: str, echo: Callable[[str], None]
) -> None:
    if not is_file(imported / TOKENIZER_FILE):
        echo("no tokenizer was imported, so none was compared")
        return
    tokenizer, template = load_tokenizer(imported), ChatTemplate.find(imported)
    request = tokenizer_check.request_for(tokenizer)
    answers = _transformers_ids(source, request, python)
    echo(f"compared the tokenizer with transformers: {request.describe(answers)}")
    for difference in tokenizer_check.differences(tokenizer, template, request, answers):
        raise DivergenceError(f"the tokenizer diverges from transformers: {difference}")


def sample_tokens(model: ModelConfig) -> np.ndarray:
    """Return random token ids for the comparison, tokens_S."""
    window = model.sliding_window or 0
    wanted = window + 16 if window + 16 <= MAX_TOKENS else MIN_TOKENS
    length = min(max(wanted, MIN_TOKENS), model.context_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=length, dtype=np.int32)


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
        _run(python, "transformers_forward.py", source, tokens, result)
        with np.load(result) as arrays:
            return Activations(list(arrays["hidden_states"]), arrays["logits"])


def _transformers_ids(
    source: Path, request: tokenizer_check.Request, python: str
) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(request._asdict()), encoding="utf-8")
        _run(python, "transformers_tokenizer.py", source, asked, result)
        answers: dict[str, list[Any]] = json.loads(result.read_text(encoding="utf-8"))
        return answers


def _run(python: str, program: str, source: Path, *files: Path) -> None:
    """Run a program beside this file with PyTorch and transformers. Raises RunFailure."""
    command = [python, str(Path(__file__).with_name(program)), str(source.resolve())]
    done = subprocess.run(
        [*command, *map(str, files)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        cause = (done.stderr.strip() or "killed, perhaps for lack of memory").splitlines()[-1]
        raise RunFailure(f"could not be checked, because transformers failed: {cause}")
