"""Write the tables of docs/performance.md from files of `on_a_gpu.py`: `gpu_tables.py FILE …`.

They go between two marks in the page, in place of those that are there.
"""

from rungs.common.command import run_command

from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_parts.results import figures_of, mark, read

PAGE = Path(__file__).parents[1] / "docs/performance.md"
BEGIN, END = "<!-- written by benchmarks/gpu_tables.py -->", "<!-- end of the GPU tables -->"
SHOWN = ("done", "stopped")
"""States of parts whose figures are shown."""


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--page", default=PAGE, type=click.Path(path_type=Path), hidden=True)
def main(files: tuple[Path, ...], page: Path) -> None:
    """Write a section for each of FILES into docs/performance.md."""
    sections = [section(path, read(path)) for path in files]
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise click.UsageError(f"{page}: has no lines {BEGIN!r} and {END!r}")
    text = "\n\n".join([BEGIN, *sections, END])
    page.write_text(f"{before}{text}{after}", encoding="utf-8")


def section(path: Path, content: dict[str, Any]) -> str:
    """Return the tables of a file.

    Raises:
        UsageError: it is of a rehearsal.
    """
    if content["rehearsal"]:
        raise click.UsageError(f"{path}: of a rehearsal, whose figures say nothing")
    measured = content["measured"]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    device = measured["device"].partition(",")[0]
    lines = [
        f"### {device}, {content['begun']}",
        f"{measured['device']}; {measured['processor']}; {versions}. Code `{measured['code']}`;"
        f" [all figures](../benchmarks/gpu_results/{path.name}). Medians, with the lowest and the"
        " highest of several turns.",
    ]
    for part in content["parts"].values():
        if part["state"] in SHOWN:
            lines.append(table(part))
    return "\n\n".join(lines)


def table(part: dict[str, Any]) -> str:
    """Return the table of a part."""
    what = part["what"]
    title = what[0].upper() + what[1:]
    stopped = "" if part["state"] == "done" else ", stopped before its end"
    rows = [
        f"| {cell(figure.name)} | {cell(figure.as_text())} | {cell(mark(figure))} |"
        for figure in figures_of(part)
    ]
    return "\n".join([f"| {cell(title)}{stopped} | | |", "|---|---:|---|", *rows])


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    run_command(main)
