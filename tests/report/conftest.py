"""Runs to show, and a browser to look at them with."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rungs.report import run_page
from rungs.report.run_page import open_runs, write_page
from tests.support.browser import chromium, tab  # noqa: F401 — fixtures
from tests.support.recorded_runs import record_run, step


@pytest.fixture(scope="package", autouse=True)
def count_here() -> Iterator[None]:
    """Count FLOPs in this process, which has imported JAX, and not in one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_page, "process_executor", lambda: ThreadPoolExecutor(1))
        yield


@pytest.fixture(scope="package")
def page_of_two_datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs with many keys that differ, on different datasets; the best checkpoint
    is the last."""
    folder = tmp_path_factory.mktemp("datasets")
    runs = [
        record_run(
            folder / "runs" / name,
            (
                step(number, validation_loss=4 - number / 100, bits_per_byte=1 - number / 500)
                for number in range(0, 101, 10)
            ),
            dataset=dataset,
            optimizer=optimizer,
            learning_rate=learning_rate,
        )
        for name, dataset, optimizer, learning_rate in (
            ("first-of-the-two", "stdlib", "adamw", 0.01),
            ("second-of-the-two", "fineweb", "muon", 0.0123),
        )
    ]
    target = folder / "datasets.html"
    write_page(target, open_runs(runs))
    return target


@pytest.fixture
def three_runs(tmp_path: Path) -> list[Path]:
    """Three runs in folders of their own."""
    return record_three_runs(tmp_path)


@pytest.fixture(scope="package")
def page_of_three_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three runs."""
    folder = tmp_path_factory.mktemp("page")
    target = folder / "compare.html"
    write_page(target, open_runs(record_three_runs(folder)))
    return target


def record_three_runs(folder: Path) -> list[Path]:
    """Write three runs into a folder `runs`."""
    return [
        record_run(folder / "runs" / "alpha", map(step, range(100))),
        record_run(
            folder / "runs" / "beta",
            (
                step(
                    number,
                    train_loss=1.5 + 1 / (number + 1),
                    **({"validation_loss": 2.0 - number / 1000} if number % 10 == 0 else {}),
                    **({"resumed": True} if number == 51 else {}),
                )
                for number in range(200)
            ),
            learning_rate=0.02,
            lineage={"like": (folder / "runs/alpha").as_posix(), "set": {"learning_rate": 0.02}},
        ),
        record_run(
            folder / "runs" / "gamma",
            (step(number, train_loss=4.0, gradient_norm=9.0) for number in range(50)),
            learning_rate=0.001,
        ),
    ]
