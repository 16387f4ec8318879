"""The page of `model.py --look` as one file: what a model does with a text."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

from rungs.config.model_config import ModelConfig
from rungs.data.text.tokenizer import REPLACEMENT_CHARACTER, Tokenizer
from rungs.inspect.look import Look
from rungs.report import page_file

SCRIPTS = (
    *("theme", "look_data", "look_text", "look_predictions", "look_attention"),
    *("look_contributions", "look"),
)
MOST_TOKENS = 512
_MOST_WEIGHTS = 8_000_000
"""Attention weights on a page, of a byte each."""
_SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"})


def most_tokens(config: ModelConfig) -> int:
    """Return the length of the longest text that a page can show."""
    maps = config.n_layers * (config.n_heads or 0)
    by_size = int((2 * _MOST_WEIGHTS / maps) ** 0.5) if maps else MOST_TOKENS
    return min(config.context_length, by_size, MOST_TOKENS)


def page(look: Look, tokenizer: Tokenizer, name: str, checkpoint: str) -> str:
    """Return the page as HTML. `look` has one sequence, `name` is the run's."""
    data = _data(look, tokenizer) | {"name": name, "checkpoint": checkpoint}
    return page_file.assemble(
        "look.html",
        styles=("page.css", "look.css"),
        scripts=SCRIPTS,
        data=json.dumps(data, allow_nan=False),
    )


def write_page(path: Path, look: Look, tokenizer: Tokenizer, name: str, checkpoint: str) -> None:
    """Write the page atomically; raises RunFailure."""
    page_file.write(path, page(look, tokenizer, name, checkpoint))


def _data(look: Look, tokenizer: Tokenizer) -> dict[str, Any]:
    def shown(ids: np.ndarray) -> list[str]:
        return [_shown(tokenizer, int(token)) for token in ids]

    predictions, parts = look.predictions, look.contributions
    candidates_LSC = predictions.tokens_LBSC[:, 0]
    known, places = np.unique(candidates_LSC, return_inverse=True)
    return {
        "tokens": shown(look.tokens_BS[0]),
        "chosen": shown(look.chosen_BS[0]),
        "losses": _rounded(look.losses_BS[0]),
        "layers": look.config.n_layers,
        "heads": look.config.n_heads or 0,
        "candidates": candidates_LSC.shape[-1],
        "predictions": {
            "texts": shown(known),
            "tokens": places.reshape(candidates_LSC.shape).tolist(),
            "probabilities": _rounded(np.exp(predictions.log_probs_LBSC[:, 0])),
            "chosen": _rounded(predictions.chosen_log_probs_LBS[:, 0]),
        },
        "contributions": {
            "logits": _rounded(parts.logits_BS[0]),
            "embedding": _rounded(parts.embedding_BS[0]),
            "heads": _rounded(parts.heads_LBNS[:, 0]),
            "feedForward": _rounded(parts.feed_forward_LBS[:, 0]),
            "biases": _rounded(parts.biases_BS[0]),
        },
        "weights": _encoded(look),
    }


def _encoded(look: Look) -> str:
    """Return base64 of the attention weights, a byte for each pair of a token and one that is not
    after it."""
    if look.layers is None:
        return ""
    weights_LNST = look.layers.weights_LBNST[:, 0]
    lower = np.tril_indices(weights_LNST.shape[-1])
    weights = np.round(255 * weights_LNST[:, :, *lower]).astype(np.uint8)
    return base64.b64encode(weights.tobytes()).decode()


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text with visible spaces; its number if it has none of its own."""
    text = tokenizer.decode([token])
    return f"[{token}]" if not text or REPLACEMENT_CHARACTER in text else text.translate(_SHOWN)


def _rounded(array: np.ndarray) -> Any:
    """Return numbers with 5 digits after the point, nested as in the array."""
    return np.round(array.astype(np.float64), 5).tolist()
