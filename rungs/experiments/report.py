"""An experiment's report: Markdown, a page that opens offline, tables for papers, and charts. All
of it follows from `experiment.json` and the ledger."""

import base64
import functools
import html
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rungs.common import disk
from rungs.common.shown_text import counted
from rungs.experiments import charts, table
from rungs.experiments.experiment import Experiment, Outcome, Outcomes, values_of
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.table import Row, unit_of, with_interval
from rungs.report import drawing

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1b1b; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.better { color: #00694d; font-weight: 600; } .worse { color: #a34600; font-weight: 600; }
"""


def write_report(folder: ExperimentFolder, experiment: Experiment, outcomes: Outcomes) -> None:
    """Write all files of the report, each atomically. Raises the error of `disk.unwritable`."""
    found = table.rows(experiment, outcomes)
    if not found:
        return
    groups = list(table.by_group(experiment, outcomes).items())
    curves = functools.partial(charts.curves, experiment=experiment)
    with drawing.use_style("plain"):
        pictures = drawing.write_all({"curves.png": curves}, groups, folder.path)
        if any(row.is_compared for row in found):
            effects = functools.partial(charts.effects, experiment=experiment)
            pictures[:0] = drawing.write_all({"effects.png": effects}, found, folder.path)
        pictures[:0] = drawing.write_all(experiment.charts(outcomes), experiment, folder.path)
    report = Report(folder, experiment, outcomes, found)
    files = {
        "table.csv": table.as_csv(experiment, found),
        "table.tex": table.as_latex(experiment, found),
        "report.md": report.as_markdown(pictures),
        "report.html": report.as_html(pictures),
    }
    for name, content in files.items():
        try:
            disk.replace_file(folder.path / name, content)
        except OSError as error:
            raise disk.unwritable(folder.path / name, error, "the report") from None


class Report:
    """The text of a report."""

    def __init__(
        self,
        folder: ExperimentFolder,
        experiment: Experiment,
        outcomes: Outcomes,
        rows: Sequence[Row],
    ) -> None:
        self._folder, self._experiment = folder, experiment
        self._outcomes, self._rows = outcomes, rows

    def as_markdown(self, pictures: Sequence[Path]) -> str:
        seeds = self._by_seed()
        lines = [f"# {charts.title_of(self._experiment)}", ""]
        lines += [f"{line}\n" for line in (*self._conclusions(), *self._facts())]
        lines += [table.as_markdown(self._experiment, self._rows)]
        lines += [*self._notes(), ""]
        lines += [f"![{path.stem}]({path.name})\n" for path in pictures]
        heading, *results = (f"| {' | '.join(map(self._linked, row))} |" for row in seeds)
        lines += [heading, f"|{'---|' * len(seeds[0])}", *results]
        return "\n".join(lines) + "\n"

    def as_html(self, pictures: Sequence[Path]) -> str:
        title = html.escape(charts.title_of(self._experiment))
        heading, *seeds = self._by_seed()
        first, last = (
            [f"<p>{html.escape(line)}</p>" for line in lines]
            for lines in ((*self._conclusions(), *self._facts()), self._notes())
        )
        images = [
            f'<p><img alt="{path.stem}" src="data:image/png;base64,'
            f'{base64.b64encode(path.read_bytes()).decode()}"></p>'
            for path in pictures
        ]
        headings, *rows = table.lines(self._experiment, self._rows)
        body = [
            *first,
            _html_table(headings, [[_cell(c) for c in row] for row in rows]),
            *last,
            *images,
            _html_table(heading, [[self._html_link(cell) for cell in row] for row in seeds]),
        ]
        return (
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f"<style>{STYLE}</style>\n<h1>{title}</h1>\n" + "\n".join(body) + "</html>\n"
        )

    def _facts(self) -> list[str]:
        """Return what was measured, on what."""
        devices = sorted({one.device for one in self._outcomes.values() if one.device})
        changes = f", with {self._experiment.changes}" if self._experiment.changes else ""
        repeated = any(one.seed for one in self._outcomes.values())
        return [
            f"{counted(len(self._outcomes), 'run')} from {self._experiment.base}{changes};"
            f" measured: {unit_of(self._experiment.measure)}."
            + " Intervals are of 95%." * repeated
            + (f" Trained on {'; '.join(devices)}." if devices else "")
        ]

    def _conclusions(self) -> list[str]:
        return self._experiment.conclusions(self._outcomes)

    def _notes(self) -> list[str]:
        """Return sentences on the noise."""
        lines = []
        for row in self._rows:
            if row.verdict and row.is_compared:
                lines.append(
                    f"{row.group}: differences from {row.against} have a standard deviation of"
                    f" {row.verdict.deviation:.3g}; {counted(row.verdict.seeds, 'seed')} can show"
                    f" an effect of {row.verdict.half_width:.2g} or more."
                )
        base = [*values_of(self._experiment, self._outcomes, self._rows[0].group).values()]
        if lines and len(base) >= 2:
            lines.insert(
                0,
                f"Noise: seeds of {self._rows[0].group} have a standard deviation of"
                f" {np.std(base, ddof=1):.3g}.",
            )
        return lines

    def _by_seed(self) -> list[list[str | Outcome]]:
        """Return the heading and rows of the table with each run's result."""
        seeds = sorted({one.seed for one in self._outcomes.values()})
        rows: list[list[str | Outcome]] = [["run", *(f"seed {seed}" for seed in seeds)]]
        for group, runs in table.by_group(self._experiment, self._outcomes).items():
            of_seed = {run.seed: run for run in runs}
            rows.append([group, *(of_seed.get(seed, "") for seed in seeds)])
        return rows

    def _linked(self, cell: str | Outcome) -> str:
        if isinstance(cell, str):
            return cell
        address = self._address(cell)
        return f"[{self._result(cell)}]({address})" if address else self._result(cell)

    def _html_link(self, cell: str | Outcome) -> str:
        if isinstance(cell, str):
            return html.escape(cell)
        address, result = self._address(cell), html.escape(self._result(cell))
        return f'<a href="{html.escape(address, quote=True)}">{result}</a>' if address else result

    def _address(self, outcome: Outcome) -> str | None:
        """Return the run's folder, unless only its line in the ledger is here."""
        folder = self._folder.runs / outcome.run
        return f"{self._folder.runs.name}/{outcome.run}/" if folder.is_dir() else None

    def _result(self, outcome: Outcome) -> str:
        value = self._experiment.value_of(outcome)
        return outcome.why or "no result" if value is None else with_interval(value, math.nan)


def _cell(text: str) -> str:
    kind = f' class="{text}"' if text in ("better", "worse") else ""
    return f"<span{kind}>{html.escape(text)}</span>"


def _html_table(heading: Sequence[object], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Its heading is text, its cells are HTML."""
    head = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in heading)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
