"""Charts of one run and of several, on hand-written runs."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib import image
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import charts
from rungs.commands.charts import comparison_folder
from rungs.common.errors import RunFailure, UserError
from rungs.report import comparison_charts, drawing, run_charts
from rungs.report.run_charts import loss_chart
from rungs.run.metrics import StepMetrics
from rungs.run.recorded_run import (
    RecordedRun,
    binned_means,
    by_interval,
    differences_table,
    load_runs,
    results_table,
    running_median,
)
from tests.support.committed_runs import ROOT

MODEL = {"vocab_size": 32, "context_length": 8, "emb_dim": 16, "n_layers": 0}
TRAIN: dict[str, Any] = {
    "dataset": "none",
    "microbatch_size": 4,
    "learning_rate": 0.01,
    "checkpoint_interval": 10,
    "clipping_max_norm": 1.0,
}
INTERVAL = TRAIN["checkpoint_interval"]
RUN_CHARTS = {
    "loss-chart.png",
    "learning-rate-chart.png",
    "gradient-norm-chart.png",
    "throughput-chart.png",
}
COMPARISON_CHARTS = {
    "loss-by-step-chart.png",
    "loss-by-tokens-chart.png",
    "loss-by-time-chart.png",
    *RUN_CHARTS - {"loss-chart.png"},
}


def step(number: int, **changes: Any) -> StepMetrics:
    plain = StepMetrics(
        global_step=number,
        tokens_seen=32 * (number + 1),
        train_loss=3.0 + 1 / (number + 1),
        learning_rate=0.01,
        gradient_norm=0.5,
        clipped=False,
        dropped_microbatches=0,
        step_seconds=0.5,
        tokens_per_second=64.0,
        validation_loss=4.0 - 0.01 * number if number % INTERVAL == 0 else None,
    )
    return dataclasses.replace(plain, **changes)


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str, steps: list[StepMetrics], **train: Any) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(MODEL))
        (folder / "train.json").write_text(json.dumps(TRAIN | train))
        (folder / "metrics.jsonl").write_text("".join(s.as_line() for s in steps))
        return folder

    return make


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def marks(lines: list[Line2D], marker: str) -> list[tuple[float, float]]:
    found = [line for line in lines if line.get_marker() == marker]
    assert len(found) == 1
    x, y = found[0].get_data()
    return list(zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True))


@pytest.mark.parametrize("chart_style", ["plain", "hand-drawn"])
@pytest.mark.filterwarnings("error")
def test_a_run_gets_four_charts_and_nothing_else(
    make_run: MakeRun, chart_style: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run("a", [step(n) for n in range(40)], chart_style=chart_style)
    before = names_in(folder)
    written = run_charts.draw_run(folder)
    assert {path.name for path in written} == RUN_CHARTS
    assert names_in(folder) - before == RUN_CHARTS
    for path in written:
        height, width, _ = image.imread(path).shape
        assert (width, height) == (1600, 1000)
    assert not caplog.records


def test_losses_of_a_mixture_are_drawn_for_each_dataset(make_run: MakeRun) -> None:
    def losses(number: int) -> dict[str, float] | None:
        return {"novels": 4.5, "code": 3.5} if number % INTERVAL == 0 else None

    steps = [step(n, validation_losses=losses(n)) for n in range(40)]
    run = RecordedRun.load(make_run("a", steps))
    (axes,) = loss_chart(run).axes
    drawn = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}
    flat = [ys for ys in drawn.values() if len(set(ys)) == 1 and len(ys) > 2]
    assert [ys[0] for ys in flat] == [4.5, 3.5]


def test_the_config_sets_the_style_of_its_own_run_only(make_run: MakeRun) -> None:
    steps = [step(n) for n in range(40)]
    plain = run_charts.draw_run(make_run("a", steps))[0].read_bytes()
    hand = make_run("hand/a", steps, chart_style="hand-drawn")
    drawn = run_charts.draw_run(hand)[0].read_bytes()
    assert drawn != plain
    assert run_charts.draw_run(hand, chart_style="plain")[0].read_bytes() == plain


def test_old_charts_stay_intact_if_writing_fails(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run("a", [step(n) for n in range(5)])
    chart = folder / "loss-chart.png"
    chart.write_bytes(b"old")
    before = names_in(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunFailure, match="No space left"):
        run_charts.draw_run(folder)
    assert chart.read_bytes() == b"old"
    assert names_in(folder) == before


def test_a_run_folder_deleted_meanwhile_is_not_made_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_run("a", [step(n) for n in range(5)])

    def draw_and_delete(run: RecordedRun) -> Figure:
        shutil.rmtree(folder)
        return loss_chart(run)

    monkeypatch.setitem(run_charts.TRAINING_CHARTS, "loss-chart.png", draw_and_delete)
    with pytest.raises(UserError, match=r"loss-chart\.png: cannot be written to: No such"):
        run_charts.draw_run(folder)
    assert not folder.exists()
    again = make_run("a", [step(n) for n in range(5)])
    assert len(run_charts.draw_run(again, tmp_path / "new" / "charts")) == 4


def test_a_damaged_checkpoint_does_not_matter(make_run: MakeRun) -> None:
    folder = make_run("a", [step(n) for n in range(5)])
    damaged = folder / "checkpoints" / "20260101Z000000-step-000000"
    damaged.mkdir(parents=True)
    (damaged / "meta.json").write_bytes(b"\xff{")
    (folder / "checkpoints" / "best").symlink_to("gone")
    assert len(run_charts.draw_run(folder)) == 4


def test_without_steps_nothing_is_drawn(make_run: MakeRun) -> None:
    folder = make_run("a", [])
    before = names_in(folder)
    assert run_charts.draw_run(folder) == []
    assert names_in(folder) == before


NOTHING_FINITE = {
    "train_loss": None,
    "gradient_norm": None,
    "validation_loss": None,
    "learning_rate": None,
    "tokens_per_second": None,
    "step_seconds": None,
    "dropped_microbatches": 4,
}
ODD_RUNS = {
    "one step": [step(0)],
    "one step, not finite": [step(0, **NOTHING_FINITE)],
    "never finite": [step(n, **NOTHING_FINITE) for n in range(30)],
    "finite every other step": [step(n, **(NOTHING_FINITE if n % 2 else {})) for n in range(30)],
    "down to zero": [step(n, train_loss=max(0, 3 - n), validation_loss=0) for n in range(30)],
    "all zero": [step(n, train_loss=0, gradient_norm=0, validation_loss=0) for n in range(3)],
    "constant": [step(n, train_loss=2.5, validation_loss=None) for n in range(30)],
    "exploding": [step(n, train_loss=10.0**n) for n in range(30)],
}


@pytest.mark.long
@pytest.mark.parametrize("steps", ODD_RUNS.values(), ids=ODD_RUNS)
@pytest.mark.filterwarnings("error")
def test_odd_runs_are_drawn(make_run: MakeRun, steps: list[StepMetrics]) -> None:
    folder = make_run("$x^{$ 日本", steps)
    assert len(run_charts.draw_run(folder)) == 4
    figure = loss_chart(RecordedRun.load(folder))
    ticks, (low, high) = figure.axes[0].get_yticks(), figure.axes[0].get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in ticks) <= 12


@pytest.mark.filterwarnings("error")
def test_odd_runs_are_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = load_runs([make_run(name, steps) for name, steps in ODD_RUNS.items()])
    assert len(comparison_charts.draw_comparison(runs, tmp_path / "out")) == len(COMPARISON_CHARTS)
    assert len(results_table(runs).splitlines()) == 1 + len(runs)


def test_a_value_that_is_not_finite_is_a_gap(make_run: MakeRun) -> None:
    steps = [step(n, **({"train_loss": None} if n in (3, 4) else {})) for n in range(30)]
    run = RecordedRun.load(make_run("a", steps))
    raw = loss_chart(run).axes[0].get_lines()[0]
    assert np.flatnonzero(np.isnan(np.asarray(raw.get_ydata()))).tolist() == [3, 4]


def test_intervals_end_with_their_checkpoint() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=38)
    values[[4, 17]] = np.nan
    values[11:21] = np.nan
    spans = by_interval(np.arange(38.0), values, INTERVAL)
    parts = [values[:1], values[1:11], values[11:21], values[21:31], values[31:]]
    assert spans.edges.tolist() == [-0.5, 0.5, 10.5, 20.5, 30.5, 37.5]
    assert spans.middles.tolist() == [0, 5.5, 15.5, 25.5, 34]
    for i, part in enumerate(parts):
        numbers = [value for value in part.tolist() if value == value]
        if i == 2:
            assert np.isnan([spans.low[i], spans.mean[i], spans.high[i]]).all()
            continue
        assert spans.low[i] == min(numbers)
        assert spans.high[i] == max(numbers)
        # The sum of ten doubles in another order differs by a few units in the last place.
        assert spans.mean[i] == pytest.approx(sum(numbers) / len(numbers), rel=1e-14)


def test_the_loss_chart_shows_band_and_mean(make_run: MakeRun) -> None:
    run = RecordedRun.load(make_run("a", [step(n) for n in range(95)]))
    axes = loss_chart(run).axes[0]
    losses = [3 + 1 / (n + 1) for n in range(95)]
    parts = [losses[:1], *(losses[first : first + 10] for first in range(1, 95, 10))]
    (band,) = axes.patches
    values, _, baseline = band.get_data()  # type: ignore[attr-defined]
    assert values.tolist() == [max(part) for part in parts]
    assert baseline.tolist() == [min(part) for part in parts]
    means = axes.get_lines()[1]
    expected = [sum(part) / len(part) for part in parts]
    assert np.asarray(means.get_ydata()).tolist() == pytest.approx(expected, rel=1e-14)


def test_running_median_ignores_spikes_and_gaps() -> None:
    y = np.full(2000, 5.0)
    y[::50] = 1000.0
    y[7] = np.nan
    x, medians = running_median(np.arange(2000.0) * 3, y, 2000)
    assert len(x) == 400
    assert (x[0], x[-1]) == (0, 5997)
    assert set(medians.tolist()) == {5.0}
    ramp = np.arange(2000.0)
    places, medians = running_median(ramp, ramp, 2000)
    inner = (places > 50) & (places < 1949)
    assert medians[inner].tolist() == places[inner].tolist()


def test_the_beginning_of_a_longer_run_has_the_same_medians() -> None:
    y = np.random.default_rng(0).normal(size=2000)
    x = np.arange(2000.0)
    whole = dict(zip(*running_median(x, y, 2000, points=50), strict=True))
    part = dict(zip(*running_median(x[:701], y[:701], 2000, points=50), strict=True))
    shared = [place for place in part if place in whole and place < 701 - 50]
    assert len(shared) == 16
    assert [part[place] for place in shared] == [whole[place] for place in shared]
    assert max(part) == 700


def test_binned_means_average_x_and_y_together() -> None:
    x, y = binned_means(np.arange(100.0), 2 * np.arange(100.0), length=5)
    assert x.tolist() == [2 + 5 * n for n in range(20)]
    assert y.tolist() == [2 * (2 + 5 * n) for n in range(20)]


PIXELS = 1600
ODD_STEPS: dict[int, dict[str, Any]] = {
    7_003: {"train_loss": 90.0, "gradient_norm": 70.0, "tokens_per_second": 1.0},
    12_345: {"train_loss": 0.5, "gradient_norm": 0.01, "learning_rate": 0.5},
}
CURVES: dict[str, Callable[[RecordedRun], Figure]] = {
    "train_loss": loss_chart,
    "learning_rate": run_charts.learning_rate_chart,
    "gradient_norm": run_charts.gradient_norm_chart,
    "tokens_per_second": run_charts.throughput_chart,
}


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text().strip() for text in figure.legends[0].get_texts()]


@pytest.fixture
def long_run(make_run: MakeRun) -> Path:
    """A run with every mark at every step."""
    marked: dict[str, Any] = {"clipped": True, "spike": "seen", "validation_loss": 4.0}
    steps = [step(n, **marked | ODD_STEPS.get(n, {})) for n in range(20_000)]
    return make_run("a", steps, checkpoint_interval=1)


def test_charts_of_many_steps_draw_few_points_and_every_extreme(long_run: Path) -> None:
    run = RecordedRun.load(long_run)
    for field, draw in CURVES.items():
        axes = draw(run).axes[0]
        drawn = [np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()]
        drawn += [band.get_data().values.tolist() for band in axes.patches]  # type: ignore[attr-defined]
        assert max(map(len, drawn)) <= 2 * PIXELS
        extremes = [[number, odd[field]] for number, odd in ODD_STEPS.items() if field in odd]
        assert all(extreme in drawn[0] for extreme in extremes)
    compared = comparison_charts.learning_rates([run]).axes[0].get_lines()[0]
    assert len(np.asarray(compared.get_xdata())) <= 2 * PIXELS


@pytest.mark.parametrize(
    ("steps", "interval", "drawn"),
    [(95, 10, 10), (95, 1_000_000, 10), (95, 50, 10), (4, 100, 1), (2000, 1, 4)],
)
def test_the_loss_is_drawn_in_intervals_that_can_be_seen(
    steps: int, interval: int, drawn: int, make_run: MakeRun
) -> None:
    folder = make_run("a", [step(n) for n in range(steps)], checkpoint_interval=interval)
    assert f"training, mean of {drawn:,} steps" in legend_of(loss_chart(RecordedRun.load(folder)))


def test_a_run_of_many_steps_takes_little_memory(make_run: MakeRun) -> None:
    folder = make_run("a", [step(n) for n in range(20_000)], checkpoint_interval=1000)
    RecordedRun.load(folder)
    tracemalloc.start()
    run = RecordedRun.load(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A list of `StepMetrics` takes 900 bytes a step.
    assert peak < 400 * len(run)


def test_the_best_step_is_that_of_the_best_checkpoint(make_run: MakeRun) -> None:
    losses = {0: 4.0, 10: 3.0, 20: 3.5}
    steps = [step(n, validation_loss=losses.get(n)) for n in range(29)]
    axes = loss_chart(RecordedRun.load(make_run("a", steps))).axes[0]
    assert marks(list(axes.get_lines()), "*") == [(10, 3.0)]
    assert [text.get_text() for text in axes.texts] == ["best: step 10, validation loss 3"]


def test_without_validation_the_best_step_is_by_training_loss(make_run: MakeRun) -> None:
    losses = {10: 1.5, 13: 0.5, 20: 2.25}
    steps = [step(n, train_loss=losses.get(n, 3.0), validation_loss=None) for n in range(29)]
    axes = loss_chart(RecordedRun.load(make_run("a", steps))).axes[0]
    assert marks(list(axes.get_lines()), "*") == [(10, 1.5)]
    assert [text.get_text() for text in axes.texts] == ["best: step 10, training loss 1.5"]


def test_spikes_are_marked(make_run: MakeRun) -> None:
    spikes = {20: "seen", 30: "skipped", 31: "skipped"}
    steps = [
        step(n, spike=spikes[n], train_loss=300.0 + n) if n in spikes else step(n)
        for n in range(40)
    ]
    figure = loss_chart(RecordedRun.load(make_run("a", steps)))
    assert marks(list(figure.axes[0].get_lines()), "x") == [(n, 300.0 + n) for n in spikes]
    legend = legend_of(figure)
    assert "loss spikes (3 steps, 2 skipped)" in legend


def test_clipped_and_dropped_steps_are_marked(make_run: MakeRun) -> None:
    odd: dict[int, dict[str, Any]] = {
        4: {"gradient_norm": 7.0, "clipped": True},
        9: {"gradient_norm": None, "dropped_microbatches": 2},
    }
    run = RecordedRun.load(make_run("a", [step(n, **odd.get(n, {})) for n in range(30)]))
    figure = run_charts.gradient_norm_chart(run)
    lines = list(figure.axes[0].get_lines())
    assert marks(lines, "v") == [(4, 7.0)]
    assert [x for x, _ in marks(lines, "|")] == [9]
    assert any(set(np.asarray(line.get_ydata()).tolist()) == {1.0} for line in lines)
    legend = legend_of(figure)
    assert {"clipping at 1", "clipped (1 of 30 steps)"} < set(legend)


def test_many_clipped_steps_are_drawn_as_their_share(make_run: MakeRun) -> None:
    steps = [step(n, gradient_norm=7.0, clipped=n >= 300) for n in range(600)]
    figure = run_charts.gradient_norm_chart(RecordedRun.load(make_run("a", steps)))
    norms, shares = figure.axes
    assert not any(line.get_marker() == "v" for line in norms.get_lines())
    (line,) = shares.get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert (y == (x > 299)).all()
    legend = legend_of(figure)
    assert "clipped (300 of 600 steps)" in legend


def test_resumes_are_marked_in_every_chart(make_run: MakeRun) -> None:
    steps = [step(n, resumed=n in (7, 23) or None) for n in range(30)]
    run = RecordedRun.load(make_run("a", steps))
    for draw in (run_charts.TRAINING_CHARTS | run_charts.STEP_CHARTS).values():
        figure = draw(run)
        assert [x for x, _ in marks(list(figure.axes[0].get_lines()), "|")] == [7, 23]
        legend = legend_of(figure)
        assert "resumed (2 times)" in legend


def test_a_part_of_a_run_is_smoothed_like_the_whole(make_run: MakeRun) -> None:
    rng = np.random.default_rng(0)
    steps = [step(n, train_loss=3 + value) for n, value in enumerate(rng.normal(size=1000))]
    runs = load_runs([make_run("whole", steps), make_run("part", steps[:400])])
    for draw, shared in ((comparison_charts.loss_by_step, 20), (comparison_charts.throughputs, 19)):
        axes = draw(runs).axes[0]
        whole, part = (np.asarray(line.get_xydata()) for line in axes.get_lines())
        np.testing.assert_array_equal(part[:shared], whole[:shared])
        assert len(part) <= shared + 2
    assert "mean of 20 steps" in comparison_charts.loss_by_step(runs).axes[0].get_title()


def test_a_stall_or_a_mistimed_step_does_not_squash_the_throughput(make_run: MakeRun) -> None:
    odd = {0: 0.01, 12: 1e9}
    steps = [step(n, tokens_per_second=odd.get(n, 64.0)) for n in range(40)]
    run = RecordedRun.load(make_run("a", steps))
    low, high = run_charts.throughput_chart(run).axes[0].get_ylim()
    assert low == 0
    assert 64 < high < 128


def test_comparison_shows_each_run_over_its_own_tokens_and_time(make_run: MakeRun) -> None:
    slow = [step(n, step_seconds=2.0, tokens_seen=100 * n) for n in range(21)]
    runs = load_runs([make_run("fast", [step(n) for n in range(31)]), make_run("slow", slow)])
    for draw, ends in (
        (comparison_charts.loss_by_tokens, (992, 2000)),
        (comparison_charts.loss_by_time, (15.5, 42)),
    ):
        training, validation = draw(runs).axes
        assert [np.asarray(line.get_xdata())[-1] for line in training.get_lines()] == list(ends)
        assert [len(np.asarray(line.get_xdata())) for line in validation.get_lines()] == [4, 3]


def test_ten_runs_are_distinguishable_without_colour(make_run: MakeRun, tmp_path: Path) -> None:
    runs = load_runs([make_run(f"r{i}", [step(n) for n in range(30)]) for i in range(10)])
    written = comparison_charts.draw_comparison(runs, tmp_path / "out")
    assert {path.name for path in written} == names_in(tmp_path / "out") == COMPARISON_CHARTS
    figure = comparison_charts.learning_rates(runs)
    lines = figure.axes[0].get_lines()
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 10
    assert len({(line.get_linestyle(), line.get_color()) for line in lines}) == 10
    assert legend_of(figure) == [f"r{i}" for i in range(10)]


@pytest.mark.filterwarnings("error")
def test_every_name_of_a_run_works_in_the_legend(make_run: MakeRun) -> None:
    names = ["_a", " a", "$x^{$"]
    runs = load_runs([make_run(name, [step(0)]) for name in names])
    figure = comparison_charts.loss_by_step(runs)
    assert [text.get_text()[1:] for text in figure.legends[0].get_texts()] == names


def test_the_legend_stays_inside_the_picture(make_run: MakeRun) -> None:
    for length in (5, 12, 30, 80):
        names = [str(i).rjust(length, "n") for i in range(10)]
        runs = load_runs([make_run(name, [step(n) for n in range(3)]) for name in names])
        with drawing.use_style("plain"):
            figure = comparison_charts.learning_rates(runs)
            figure.draw_without_rendering()
            box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= 1600


def test_the_results_table_matches_the_metrics(make_run: MakeRun) -> None:
    validation = {0: 4.0, 10: 2.5, 20: 3.0}
    run = RecordedRun.load(
        make_run("a", [step(n, validation_loss=validation.get(n)) for n in range(21)])
    )
    _, line = results_table([run]).splitlines()
    assert line.split("  ")[0] == "a"
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells == ["a", "21", "672", "3.0476", "3.0000", "2.5000 at step 10", "64", "10.5 s"]


def test_the_differences_table_has_only_keys_that_differ(make_run: MakeRun) -> None:
    lineage = {"like": "runs/a", "set": {"seed": 7}}
    folders = [
        make_run("a", [step(0)], weight_decay=0.01),  # the default, written out
        make_run("b", [step(0)], seed=7, lineage=lineage),
    ]
    lines = differences_table(load_runs(folders)).splitlines()
    assert [line.split() for line in lines] == [
        ["file", "key", "a", "b"],
        ["train.json", "seed", "0", "7"],
    ]
    assert "same" in differences_table(load_runs(folders[:1] * 2))


def test_runs_of_the_same_name_get_their_paths(make_run: MakeRun) -> None:
    folders = [make_run("a", [step(0)]), make_run("old/a", [step(0)]), make_run("b", [step(0)])]
    assert [run.name for run in load_runs(folders)] == [str(folders[0]), str(folders[1]), "b"]


def test_the_comparison_folder_names_its_runs() -> None:
    assert comparison_folder(["a", "b"]) == Path("comparisons/a+b")
    many = [f"a-run-with-a-long-name-{i}" for i in range(20)]
    folder = comparison_folder(many)
    assert len(folder.name) < 80
    assert folder.name.startswith("a-run-with-a-long-name-0+19-more-")
    assert folder != comparison_folder([*many[:-1], "another"])


@pytest.mark.long
def test_command_redraws_one_run_and_compares_several(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [step(n) for n in range(12)]
    first, second = make_run("a", steps), make_run("b", steps, learning_rate=0.5)
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(charts.main, ["a", "runs/a/"], catch_exceptions=False)
    assert run.exit_code == 0
    assert names_in(first) >= RUN_CHARTS
    assert not names_in(second) & RUN_CHARTS
    run = CliRunner().invoke(charts.main, ["a", "runs/b"], catch_exceptions=False)
    assert run.exit_code == 0
    assert names_in(tmp_path / "comparisons" / "a+b") == COMPARISON_CHARTS
    assert run.stdout.splitlines()[-1].split() == ["train.json", "learning_rate", "0.01", "0.5"]
    assert not names_in(second) & RUN_CHARTS
    arguments = ["a", "b", "--output-dir", "out", "--style", "hand-drawn"]
    run = CliRunner().invoke(charts.main, arguments, catch_exceptions=False)
    assert run.exit_code == 0
    assert names_in(tmp_path / "out") == COMPARISON_CHARTS


def test_bad_input_is_reported_in_one_line(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("a", [step(0)])
    make_run("empty", [])
    (tmp_path / "file").write_text("")
    for arguments, reason in [
        (["gone"], "no such run"),
        (["empty"], "no step recorded"),
        (["a", "empty"], "no step recorded"),
        (["a", "--output-dir", "file"], "file: is there and is no folder"),
    ]:
        with pytest.raises(UserError, match=reason) as error:
            charts.main.main(arguments, standalone_mode=False)
        assert len(str(error.value).splitlines()) == 1


START_AND_LIST_MODULES = """
import runpy, sys
sys.argv = ["charts.py", "gone"]
try:
    runpy.run_path("charts.py", run_name="__main__")
finally:
    print(*{"jax", "flax", "orbax"} & sys.modules.keys())
"""


@pytest.mark.long
def test_command_exits_with_2_and_starts_without_jax() -> None:
    command = [sys.executable, "-c", START_AND_LIST_MODULES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("error: gone: no such run folder")
    assert len(run.stderr.splitlines()) == 1
    assert run.stdout == "\n"
