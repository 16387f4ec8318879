"""The table that `train_speed.py` prints: each side's speed relative to the others and the peak."""

import dataclasses
import statistics
from typing import NamedTuple

from benchmarks.report import spread
from rungs.common.shown_text import align_columns

REFERENCE = "plain loop"
"""Name of the side that is the loop as one first writes it."""
PYTORCH = "PyTorch"
"""What the names of PyTorch's sides begin with."""
HEADING = (
    "side",
    "tokens/s (lowest to highest)",
    f"÷ {REFERENCE}",
    f"÷ fastest {PYTORCH}",
    "GFLOP/s",
    "of the peak",
    "last loss",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """GPT-2's architecture, with an untied head and without biases of query, key and value.

    Its costs are formulas, so that the process that prints does not start JAX and leaves the
    devices to the sides.
    """

    vocab: int
    length: int
    """Tokens of a sequence, as many as the context has."""
    width: int
    heads: int
    layers: int

    @property
    def parameters(self) -> int:
        """All but the two embedding tables; the head is included."""
        norm = 2 * self.width
        attention = 4 * self.width**2 + self.width
        feed_forward = 8 * self.width**2 + 5 * self.width
        block = attention + feed_forward + 2 * norm
        return self.layers * block + norm + self.vocab * self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 per parameter (Kaplan et al. 2020, section 2.1), and
        12 · L · d · T for attention: the whole square T · T, of which the mask hides half."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.length


class Row(NamedTuple):
    """What was measured of a side."""

    name: str
    rates: list[float]
    """Tokens per second in each turn."""
    loss: float
    """Of the last step."""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def speed_table(rows: list[Row], flops_per_token: float, peak: float) -> str:
    """Return the rows as an aligned table, with "–" where there is nothing to compare with.

    Args:
        peak: FLOPs per second.
    """
    reference = next((row.rate for row in rows if row.name == REFERENCE), None)
    fastest = max((row.rate for row in rows if row.name.startswith(PYTORCH)), default=None)
    cells = [
        (
            row.name,
            spread(row.rates, 0),
            _ratio(row.rate, reference),
            _ratio(row.rate, fastest),
            f"{row.rate * flops_per_token / 1e9:,.1f}",
            f"{row.rate * flops_per_token / peak:.1%}",
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    return align_columns([HEADING, *cells])


def _ratio(rate: float, other: float | None) -> str:
    return f"{rate / other:.2f}" if other else "–"
