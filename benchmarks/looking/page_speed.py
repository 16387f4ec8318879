"""How fast the page of ten long runs is made, opens and zooms.

Writes the metrics of several runs, makes their page with `charts.py --page`, and opens it in
headless Chromium, which must be installed. Prints the seconds to make it, its megabytes, the
milliseconds to the first paint and to the complete page, and the frames per second while all charts
zoom.
"""

from rungs.common.command import run_command

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.checkpoints_and_data.chart_cost import write_run
from benchmarks.report import spread

_FRAMES = 60
ZOOM = """async (frames) => {
  const chart = document.querySelector(".chart");
  const times = [performance.now()];
  for (let i = 0; i < frames; i++) {
    const key = i % 2 ? "-" : "+";
    chart.dispatchEvent(new KeyboardEvent("keydown", { key: i < 8 ? "+" : key, bubbles: true }));
    await new Promise(requestAnimationFrame);
    times.push(performance.now());
  }
  return times.slice(1).map((time, i) => time - times[i]);
}"""


@click.command()
@click.option("--runs", default=10, show_default=True)
@click.option("--steps", default=100_000, show_default=True)
@click.option("--turns", default=5, show_default=True)
def main(runs: int, steps: int, turns: int) -> None:
    """Print the times of the page."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise click.ClickException("no chromium on this machine")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"run-{number}" for number in range(runs)]
        for number, folder in enumerate(folders):
            folder.mkdir()
            write_run(folder, steps, seed=number)
        page = Path(name) / "page.html"
        made = [make(folders, page) for _ in range(turns)]
        opened = [look(chromium, page) for _ in range(turns)]
    paints, complete, frames = zip(*opened, strict=True)
    click.echo(f"{runs} runs of {steps:,} steps, {page_size(made):.2f} MB")
    click.echo(f"made in {spread([seconds for seconds, _ in made])} s")
    click.echo(f"first paint after {spread(paints, 0)} ms, complete after {spread(complete, 0)} ms")
    rates = [1000 / float(np.median(one)) for one in frames]
    click.echo(f"zooms with {spread(rates, 0)} frames per second (medians of {_FRAMES} frames)")


def make(folders: list[Path], page: Path) -> tuple[float, float]:
    """Return the seconds that the command takes, and the megabytes of the page."""
    begin = time.perf_counter()
    command = [sys.executable, "charts.py", *map(str, folders), "--page", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin, page.stat().st_size / 1e6


def page_size(made: list[tuple[float, float]]) -> float:
    return made[-1][1]


def look(chromium: str, page: Path) -> tuple[float, float, list[float]]:
    """Return the milliseconds to the first paint and to all charts, and those of each frame."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab: Any = browser.new_page(viewport={"width": 1400, "height": 1000})
        begin = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_selector(".uplot canvas")
        complete = 1000 * (time.perf_counter() - begin)
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        frames = tab.evaluate(ZOOM, _FRAMES)
        browser.close()
    return paint, complete, frames


if __name__ == "__main__":
    run_command(main)
