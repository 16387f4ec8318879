"""The table of an experiment's results: as text, Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rungs.common.shown_text import align_columns
from rungs.experiments.experiment import (
    Comparison,
    Experiment,
    Measure,
    Outcome,
    Outcomes,
    Score,
    Target,
    values_of,
)
from rungs.experiments.verdict import Judgement, Verdict, mean_interval

HEADINGS = ("run", "seeds", "difference", "verdict", "tokens/s", "minutes")
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}


class Row(NamedTuple):
    """The runs of one group."""

    group: str
    seeds: int
    """Runs with a result."""
    mean: float
    half_width: float
    """Half of Student's 95% interval of the mean; NaN with one seed."""
    against: str | None
    verdict: Verdict | None
    tokens_per_second: float
    minutes: float
    """Of training, mean of the runs."""
    failures: Sequence[str]
    """Why runs have no result."""

    @property
    def is_compared(self) -> bool:
        """Whether there is a difference to show."""
        return self.verdict is not None and self.verdict.judgement is not Judgement.FAILED

    @property
    def cells(self) -> list[str]:
        """The row as text, in the order of `HEADINGS`, the measure after the first."""
        result = (
            with_interval(self.mean, self.half_width) if self.seeds else "; ".join(self.failures)
        )
        difference = ""
        if self.verdict and self.is_compared:
            difference = signed(self.verdict.difference, self.verdict.half_width)
        return [
            self.group,
            result,
            f"{self.seeds}",
            difference,
            describe(self.verdict) if self.verdict else "",
            f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "",
            f"{self.minutes:.1f}",
        ]


def rows(experiment: Experiment, outcomes: Outcomes) -> list[Row]:
    """Return a row for each group of runs, in the order of the experiment, or the best first if it
    ranks them."""
    comparisons = {one.group: one for one in experiment.comparisons(outcomes)}
    found = [
        _row(
            group, runs, [*values_of(experiment, outcomes, group).values()], comparisons.get(group)
        )
        for group, runs in by_group(experiment, outcomes).items()
    ]
    if experiment.ranks:
        sign = 1 if experiment.lower_is_better else -1
        found.sort(key=lambda row: sign * row.mean if row.seeds else math.inf)
    return found


def _row(
    group: str, found: Sequence[Outcome], values: list[float], comparison: Comparison | None
) -> Row:
    speeds = [one.tokens_per_second for one in found if one.tokens_per_second]
    return Row(
        group=group,
        seeds=len(values),
        mean=float(np.mean(values)) if values else math.nan,
        half_width=mean_interval(values),
        against=comparison and comparison.against,
        verdict=comparison and comparison.verdict,
        tokens_per_second=float(np.mean(speeds)) if speeds else 0.0,
        minutes=float(np.mean([one.minutes for one in found])),
        failures=sorted({one.why for one in found if one.why}),
    )


def unit_of(measure: Measure) -> str:
    """Return what is measured, as a heading."""
    if isinstance(measure, Score):
        return measure.score
    if isinstance(measure, Target):
        unit = "minutes" if measure.minutes_to else "tokens"
        return f"{unit} to a loss of {measure.minutes_to or measure.tokens_to:g}"
    return measure.replace("_at_", "@").replace("_", " ")


def describe(verdict: Verdict) -> str:
    """Return a verdict in words."""
    if verdict.judgement is Judgement.FAILED:
        return "too few results"
    if verdict.judgement is Judgement.UNDECIDED:
        needed = verdict.seeds_needed
        return "undecided; " + (
            f"{needed:,} seeds would be likely to tell"
            if needed
            else "no number of seeds would tell"
        )
    return str(verdict.judgement)


def decimals(half_width: float) -> int:
    """Return how many decimals show the first two digits of an interval, at most six."""
    if not half_width or not math.isfinite(half_width):
        return 4
    return min(max(1 - math.floor(math.log10(half_width)), 0), 6)


def with_interval(value: float, half_width: float) -> str:
    """Return a value with its interval, such as `3.442 ± 0.016`."""
    if math.isnan(half_width):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    digits = decimals(half_width)
    return f"{value:,.{digits}f} ± {half_width:,.{digits}f}"


def signed(value: float, half_width: float) -> str:
    """Return a difference with its sign and interval."""
    if math.isinf(half_width):
        return f"{value:+,.4f}"
    digits = decimals(half_width)
    return f"{value:+,.{digits}f} ± {half_width:,.{digits}f}"


def lines(experiment: Experiment, found: Sequence[Row]) -> list[list[str]]:
    """Return the heading and the rows, without columns in which no row has anything."""
    heading = [HEADINGS[0], unit_of(experiment.measure), *HEADINGS[1:]]
    columns = zip(heading, *(row.cells for row in found), strict=True)
    return [[*line] for line in zip(*(each for each in columns if any(each[1:])), strict=True)]


def as_text(experiment: Experiment, found: Sequence[Row]) -> str:
    return align_columns(lines(experiment, found))


def as_markdown(experiment: Experiment, found: Sequence[Row]) -> str:
    heading, *body = lines(experiment, found)
    rule = ["---"] * len(heading)
    return "".join(
        f"| {' | '.join(map(_in_markdown, cells))} |\n" for cells in (heading, rule, *body)
    )


def as_csv(experiment: Experiment, found: Sequence[Row]) -> str:
    """Return the table with one number in a cell."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [
            *("run", unit_of(experiment.measure), "half_width", "seeds", "against", "difference"),
            *("difference_low", "difference_high", "verdict", "tokens_per_second", "minutes"),
        ]
    )
    writer.writerows(map(_numbers, found))
    return file.getvalue()


def _numbers(row: Row) -> list[object]:
    verdict = row.verdict
    compared: list[object] = ["", "", "", "", ""]
    if verdict:
        compared = [row.against, verdict.difference, *verdict.interval, verdict.judgement]
    return [
        row.group,
        row.mean,
        row.half_width,
        row.seeds,
        *compared,
        row.tokens_per_second,
        row.minutes,
    ]


def as_latex(experiment: Experiment, found: Sequence[Row]) -> str:
    """Return a `tabular`, to be set with booktabs."""
    heading, *cells = lines(experiment, found)
    body = " \\\\\n".join(" & ".join(map(_in_latex, each)) for each in cells)
    return (
        f"\\begin{{tabular}}{{l{'r' * (len(heading) - 1)}}}\n\\toprule\n"
        f"{' & '.join(map(_in_latex, heading))} \\\\\n\\midrule\n{body} \\\\\n"
        "\\bottomrule\n\\end{tabular}\n"
    )


def _in_latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return escaped.replace("±", r"$\pm$")


def _in_markdown(text: str) -> str:
    return text.replace("|", "\\|")


def by_group(experiment: Experiment, outcomes: Outcomes) -> dict[str, list[Outcome]]:
    """Return the runs of each group, in the order of the experiment: workers end in any."""
    place = {trial.name: number for number, trial in enumerate(experiment.trials(outcomes))}
    groups: dict[str, list[Outcome]] = {}
    for name in sorted(outcomes, key=lambda name: place.get(name, len(place))):
        groups.setdefault(outcomes[name].group, []).append(outcomes[name])
    return groups
