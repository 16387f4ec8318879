"""What `train_speed.py` prints: each side's speed beside the others and the machine's peak."""

import dataclasses
import statistics
from typing import NamedTuple

REFERENCE = "plain loop"
"""Name of the side that is the loop as one first writes it."""
PYTORCH = "PyTorch"
"""What the names of PyTorch's sides begin with."""
HEADINGS = (
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
    """A GPT as GPT-2, but for an untied head and no biases of query, key and value. Counted in
    closed form, as the process that prints leaves JAX, and its devices, to the sides."""

    vocab: int
    length: int
    """Tokens of a sequence, as many as the context has."""
    width: int
    heads: int
    layers: int

    @property
    def parameters(self) -> int:
        """All but the two embedding tables; the head is among them."""
        norm = 2 * self.width
        attention = 4 * self.width**2 + self.width
        feed_forward = 8 * self.width**2 + 5 * self.width
        block = attention + feed_forward + 2 * norm
        return self.layers * block + norm + self.vocab * self.width

    @property
    def flops_per_token(self) -> int:
        """Forwards and backwards: 6 for each parameter (Kaplan et al. 2020, section 2.1), and 12 ·
        L · d · T for attention, which is all of the square T · T, half of which the mask hides."""
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


def table(rows: list[Row], flops_per_token: float, peak: float) -> str:
    """The rows as an aligned Markdown table; «–» where there is nothing to compare with.

    Args:
        peak: FLOP per second.
    """
    reference = next((row.rate for row in rows if row.name == REFERENCE), None)
    fastest = max((row.rate for row in rows if row.name.startswith(PYTORCH)), default=None)
    cells = [
        (
            row.name,
            f"{row.rate:,.0f} ({min(row.rates):,.0f} to {max(row.rates):,.0f})",
            _ratio(row.rate, reference),
            _ratio(row.rate, fastest),
            f"{row.rate * flops_per_token / 1e9:,.1f}",
            f"{row.rate * flops_per_token / peak:.1%}",
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    return _aligned([HEADINGS, *cells])


def _ratio(rate: float, other: float | None) -> str:
    return f"{rate / other:.2f}" if other else "–"


def _aligned(cells: list[tuple[str, ...]]) -> str:
    """The first row as headings; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *figures in cells:
        padded = [f"{figure:>{width}}" for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append(f"| {name:{widths[0]}} | {' | '.join(padded)} |")
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, f"| {' | '.join(rules)} |")
    return "\n".join(lines)
