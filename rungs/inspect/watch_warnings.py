"""Warnings about what a layer does."""

import numpy as np

from rungs.common.shown_text import counted
from rungs.config.model_config import ModelConfig
from rungs.run.layer_record import HEADS, LARGEST_LOGIT, Rows

LOGIT_LIMITS = (1_000, 10_000)
"""Round numbers that we chose from two papers. Logits at 1,000 usually come with loss spikes and
sometimes with divergence (Kimi Team 2025, "Kimi K2", section 2.1); a model of 10M parameters with
logits set to that learned worse (Wortsman et al. 2023, "Small-scale proxies for large-scale
Transformer training instabilities", figure 10). All their models with logits above 10,000, of the
first layer at step 2,000, diverged (figure 9)."""


def attention_warning(model: ModelConfig, before: Rows | None, now: Rows) -> str | None:
    """Return a line with advice if the largest attention logit of a layer has risen above one of
    `LOGIT_LIMITS` since the row `before`, None if there is none; else None."""
    if HEADS not in (now.dtype.names or ()):
        return None
    largest_L = _largest(now)
    levels_L = np.searchsorted(LOGIT_LIMITS, largest_L)
    before_L = 0 if before is None else np.searchsorted(LOGIT_LIMITS, _largest(before))
    risen = np.flatnonzero(levels_L > before_L)
    if not len(risen):
        return None
    layer = risen[np.argmax(largest_L[risen])]
    others = f" (and those of {counted(len(risen) - 1, 'other layer')})" * (len(risen) > 1)
    return (
        f"layer {layer}'s attention logits grow{others}: the largest is {largest_L[layer]:,.0f},"
        f" above {LOGIT_LIMITS[levels_L[layer] - 1]:,}; {_advice(model)}"
    )


def _largest(row: Rows) -> np.ndarray:
    """Return the largest logit of each layer in the last row; 0 for one that is not finite."""
    largest_L = row[HEADS][LARGEST_LOGIT][-1].max(axis=-1)
    return np.where(np.isfinite(largest_L), largest_L, 0)


def _advice(model: ModelConfig) -> str:
    keys = ['"qk_norm": true'] * (not model.qk_norm)
    keys += ['"attention_soft_cap": 50'] * (model.attention_soft_cap is None)
    new = f"start another run with {' or '.join(keys)} in its model.json, or " if keys else ""
    return f"{new}lower learning_rate"
