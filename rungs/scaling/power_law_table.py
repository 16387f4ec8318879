"""A power law in words: what it is, how sure, and what speaks against it."""

from rungs.scaling.power_law import LEAST_RUNS_TO_BEND, Estimate, PowerLaw
from rungs.scaling.scaled_runs import BEYOND, ScaledRuns


def as_text(scaled: ScaledRuns) -> str:
    """A line for each figure, then one for each thing to know of them."""
    law, told = scaled.law, scaled.prediction
    rows = {
        "power law": f"loss = {law.coefficient:.6g} · C^{-law.exponent.value:.6g}, C in FLOPs,"
        f" through {law.runs} runs",
        "exponent": f"{shown(law.exponent)}, 95% interval",
        "scatter": f"{law.scatter_percent:.2g}% of the loss, one standard deviation",
        "prediction": f"{told.value:.4g} at {BEYOND * scaled.largest_compute:.3g} FLOPs,"
        f" {BEYOND} times the largest; 95% interval {told.low:.4g} to {told.high:.4g}",
    }
    lines = [f"{name:12}{text}" for name, text in rows.items()]
    return "\n".join([*lines, "", *_judgement(law), *scaled.cautions])


def shown(estimate: Estimate) -> str:
    """A number and half its interval, to two digits of that."""
    half = estimate.high - estimate.value
    digits = next((n for n in range(2, 7) if half >= 10 ** (1 - n)), 7)
    return f"{estimate.value:.{digits}f} ± {half:.{digits}f}"


def bend(law: PowerLaw) -> str:
    """What a bend means for the line, where the points bend."""
    if law.curvature is None or not law.bends:
        return ""
    upward = law.curvature.value > 0
    way, side = ("upward", "low") if upward else ("downward", "high")
    return f"the points bend {way}: beyond them a straight line is too {side}"


def _judgement(law: PowerLaw) -> list[str]:
    lines = []
    if law.exponent.may_be_zero:
        lines.append("The exponent may be 0: these runs do not show that loss falls with compute.")
    if law.curvature is None:
        left = law.runs - 2
        lines.append(
            f"{law.runs} runs leave {left} degree{'s' * (left > 1)} of freedom, so the intervals"
            f" are wide; from {LEAST_RUNS_TO_BEND} on it is told whether the points bend, too."
        )
        return lines
    verdict = f"Not a power law: {bend(law)}" if law.bends else "No bend is seen"
    return [*lines, f"{verdict} (term in log² C: {shown(law.curvature)}, 95% interval)."]
