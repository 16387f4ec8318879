"""Charts of hand-written runs: what is drawn, in which files, and what is left out."""

import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rungs.cli import charts
from rungs.cli.charts import comparison_folder
from rungs.common.errors import RunFailure, UserError
from rungs.report import comparison_charts, drawing, run_charts
from rungs.report.comparison_charts import COMPARISON_CHARTS, draw_comparison
from rungs.report.run_charts import (
    POLICY_CHARTS,
    PREFERENCE_CHARTS,
    STEP_CHARTS,
    TRAINING_CHARTS,
    draw_run,
    gradient_norm_chart,
    loss_chart,
)
from rungs.run.metrics import PreferenceFigures, StepMetrics
from rungs.run.recorded_run import (
    RecordedPolicyRun,
    RecordedRun,
    differences_table,
    results_table,
)
from tests.support import policy_steps
from tests.support.policy_steps import policy_run
from tests.support.recorded_runs import record_run, step
from tests.support.tiny_run import make_run as make_tiny_run

RUN_CHARTS = TRAINING_CHARTS.keys() | STEP_CHARTS.keys()
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run of some steps under `runs/`; a number stands for so many plain steps."""

    def make(name: str, steps: int | list[dict[str, Any]], **train: Any) -> Path:
        plain = [step(n) for n in range(steps)] if isinstance(steps, int) else steps
        return record_run(tmp_path / "runs" / name, plain, clipping_max_norm=1.0, **train)

    return make


def preference_run(folder: Path, with_reference: bool = True) -> Path:
    run = make_tiny_run(folder / "run", objective="dpo", start_from="runs/none", dataset="prefs")
    lines = []
    for n in range(12):
        kl = 0.1 * n if with_reference else None
        figures = PreferenceFigures(0.2 * n, 0.5 + n / 30, -1.0 - n, -2.0 - n, kl)
        parts: dict[str, Any] = {"preferences": None if n == 3 else figures}
        if n % 5 == 0:
            parts |= {"validation_loss": 0.6, "validation_preferences": figures}
        common = (n, 8 * n, 0.69, 0.01, 1.0, False, 0, 0.5, 16.0)
        lines.append(StepMetrics(*common, **parts).as_line())
    run.metrics.write_text("".join(lines))
    return run.path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def marked(axes: Axes, marker: str) -> list[tuple[float, float]]:
    """Return the points of the only line with a marker."""
    [found] = [line for line in axes.get_lines() if line.get_marker() == marker]
    return [(float(x), float(y)) for x, y in np.asarray(found.get_xydata())]


def heights(axes: Axes) -> list[list[float]]:
    return [np.asarray(line.get_ydata(), float).tolist() for line in axes.get_lines()]


def legend_of(figure: Figure) -> set[str]:
    return {text.get_text().strip() for text in figure.legends[0].get_texts()}


# Files


@pytest.mark.parametrize("chart_style", ["plain", "hand-drawn"])
@pytest.mark.filterwarnings("error")
def test_a_run_gets_four_charts_and_nothing_else(make_run: MakeRun, chart_style: str) -> None:
    folder = make_run("a", 40, chart_style=chart_style)
    before = names_in(folder)
    written = draw_run(folder)
    assert {path.name for path in written} == names_in(folder) - before == RUN_CHARTS
    assert all(image.imread(path).shape[:2] == (1000, 1600) for path in written)
    as_config_says = written[0].read_bytes()
    is_plain = draw_run(folder, chart_style="plain")[0].read_bytes() == as_config_says
    assert is_plain == (chart_style == "plain")


def test_charts_of_preferences(tmp_path: Path) -> None:
    written = {path.name for path in draw_run(preference_run(tmp_path, with_reference=True))}
    assert written == RUN_CHARTS | PREFERENCE_CHARTS.keys()


def test_charts_of_reinforcement_learning(tmp_path: Path) -> None:
    folder = policy_run(tmp_path / "run", [policy_steps.step(n) for n in range(30)])
    assert {path.name for path in draw_run(folder)} == POLICY_CHARTS.keys() | STEP_CHARTS.keys()


def test_old_charts_stay_intact_if_writing_fails(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run("a", 5)
    (folder / "loss-chart.png").write_bytes(b"old")
    before = names_in(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunFailure, match="No space left"):
        draw_run(folder)
    assert (folder / "loss-chart.png").read_bytes() == b"old"
    assert names_in(folder) == before


def test_without_steps_nothing_is_drawn(make_run: MakeRun) -> None:
    folder = make_run("a", 0)
    assert draw_run(folder) == []
    assert not RUN_CHARTS & names_in(folder)


MISSING = ("train_loss", "gradient_norm", "learning_rate", "tokens_per_second", "step_seconds")
NOTHING_FINITE = dict.fromkeys(MISSING) | {"dropped_microbatches": 4}
ODD_RUNS = {
    "one step": [step(0)],
    "one step, not finite": [step(0, **NOTHING_FINITE)],
    "never finite": [step(n, **NOTHING_FINITE) for n in range(30)],
    "finite every other step": [step(n, **(NOTHING_FINITE if n % 2 else {})) for n in range(30)],
    "down to zero": [step(n, train_loss=max(0, 3 - n), validation_loss=0) for n in range(30)],
    "all zero": [step(n, train_loss=0, gradient_norm=0, validation_loss=0) for n in range(3)],
    "exploding $x^{$ 日本": [step(n, train_loss=10.0**n) for n in range(30)],
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["one step, not finite", "exploding $x^{$ 日本"])
@pytest.mark.filterwarnings("error")
def test_odd_runs_are_drawn(make_run: MakeRun, name: str) -> None:
    folder = make_run(name, ODD_RUNS[name])
    assert len(draw_run(folder)) == 4
    axes = loss_chart(RecordedRun.load(folder)).axes[0]
    low, high = axes.get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 12


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_odd_runs_are_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = RecordedRun.load_all([make_run(name, steps) for name, steps in ODD_RUNS.items()])
    assert len(draw_comparison(runs, tmp_path / "out")) == len(COMPARISON_CHARTS)
    assert len(results_table(runs).splitlines()) == 1 + len(runs)


# Smoothing


def test_stretches_against_numpy() -> None:
    y = np.random.default_rng(0).normal(size=38)
    y[[4, 17]] = np.nan
    y[20:30] = np.nan
    of = drawing.in_stretches(np.arange(38.0), y, 10)
    for i, part in enumerate([y[:10], y[10:20], y[20:30], y[30:]]):
        numbers = [value for value in part.tolist() if value == value] or [np.nan]
        expected = min(numbers), statistics.median(numbers), max(numbers)
        np.testing.assert_array_equal((of.low[i], of.middle[i], of.high[i]), expected)
    assert of.x.tolist() == [4.5, 14.5, 24.5, 33.5]


def test_a_trend_has_every_step_the_band_and_the_median(make_run: MakeRun) -> None:
    run = RecordedRun.load(make_run("a", 250))
    axes = loss_chart(run).axes[0]
    losses = [2 + 1 / (n + 1) for n in range(250)]
    each, medians, *_ = heights(axes)
    assert each == losses
    assert medians == [*losses[1:249:3], losses[-1]]
    [band] = axes.collections
    ys = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert (ys.min(), ys.max()) == (losses[-1], losses[0])
    assert "training, median of 3 steps" in legend_of(loss_chart(run))


def test_a_thinned_line_has_every_extreme_and_long_gaps() -> None:
    x, y = np.arange(50_000.0), np.random.default_rng(0).normal(size=50_000)
    y[[123, 40_321]] = 9.0, -9.0
    y[20_000:21_000] = np.nan
    thin_x, thin_y = drawing.thin_line(x, y)
    assert len(thin_y) <= 2 * drawing.STRETCHES
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    assert {123.0, 40_321.0} <= set(thin_x.tolist())
    assert np.isnan(thin_y[(thin_x > 20_100) & (thin_x < 20_900)]).all()
    assert drawing.thin_line(x[:3000], y[:3000])[0] is not thin_x
    np.testing.assert_array_equal(drawing.thin_line(x[:3000], y[:3000])[1], y[:3000])


def test_a_part_of_a_run_is_smoothed_like_the_whole(make_run: MakeRun) -> None:
    noise = np.random.default_rng(0).normal(size=1000)
    steps = [step(n, train_loss=3 + value) for n, value in enumerate(noise.tolist())]
    runs = RecordedRun.load_all([make_run("whole", steps), make_run("part", steps[:400])])
    lines = comparison_charts.loss_by_step(runs).axes[0].get_lines()
    whole, part = (np.asarray(line.get_xydata()) for line in lines)
    np.testing.assert_array_equal(part, whole[: len(part)])
    assert len(part) == 20


@pytest.mark.parametrize(("low", "high"), [(2, 11), (3.1, 3.3), (0.3, 40), (1e-9, 10), (1, 1e30)])
def test_logarithmic_ticks_are_few_and_round(low: float, high: float) -> None:
    ticks = drawing.log_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert low <= ticks.min() <= ticks.max() <= high
    assert all(len(f"{tick:g}") <= 5 for tick in ticks)


# What is marked


def test_the_loss_chart_marks_spikes_and_the_best_checkpoint(make_run: MakeRun) -> None:
    losses, spikes = {0: 4.0, 10: 3.0, 20: 3.5}, {20: "seen", 21: "skipped", 22: "skipped"}
    steps = [step(n, validation_loss=losses.get(n), spike=spikes.get(n)) for n in range(29)]
    figure = loss_chart(RecordedRun.load(make_run("a", steps)))
    axes = figure.axes[0]
    assert marked(axes, "*") == [(10, 3.0)]
    assert [text.get_text() for text in axes.texts] == ["best: step 10, validation loss 3"]
    assert [x for x, _ in marked(axes, "x")] == [*spikes]
    assert "loss spikes (3 steps, 2 skipped)" in legend_of(figure)


def test_losses_of_a_mixture_are_drawn_for_each_dataset(make_run: MakeRun) -> None:
    losses = {"novels": 4.5, "code": 3.5}
    steps = [step(n, validation_losses=None if n % 10 else losses) for n in range(40)]
    figure = loss_chart(RecordedRun.load(make_run("a", steps)))
    assert heights(figure.axes[0])[-4:-2] == [[4.5] * 4, [3.5] * 4]
    assert {"validation on novels", "validation on code"} < legend_of(figure)


def test_few_validations_are_points_and_many_a_line_with_some(make_run: MakeRun) -> None:
    for every, is_line in (100, False), (10, True), (1, True):
        steps = [step(n, validation_loss=None if n % every else 3.0) for n in range(300)]
        axes = loss_chart(RecordedRun.load(make_run(f"every-{every}", steps))).axes[0]
        [line] = [line for line in axes.get_lines() if line.get_marker() == "s"]
        assert (line.get_linestyle() != "None") == is_line
        marks = np.asarray(line.get_xdata())[:: line.get_markevery()]
        assert len(marks) == min(300 // every, 30)


def test_clipped_and_dropped_steps_are_marked(make_run: MakeRun) -> None:
    odd: dict[int, dict[str, Any]] = {
        4: {"gradient_norm": 7.0, "clipped": True},
        9: {"gradient_norm": None, "dropped_microbatches": 2},
    }
    figure = gradient_norm_chart(
        RecordedRun.load(make_run("a", [step(n, **odd.get(n, {})) for n in range(30)]))
    )
    strokes = [line for line in figure.axes[0].get_lines() if line.get_marker() == "|"]
    assert [np.asarray(line.get_xdata()).tolist() for line in strokes] == [[4], [9]]
    assert {"clipping at 1", "clipped (1 of 30 steps)"} < legend_of(figure)


def test_resumes_are_marked_in_every_chart(make_run: MakeRun) -> None:
    steps = [step(n, resumed=n in (7, 23) or None) for n in range(30)]
    run = RecordedRun.load(make_run("a", steps))
    for draw in (TRAINING_CHARTS | STEP_CHARTS).values():
        figure = draw(run)
        assert [x for x, _ in marked(figure.axes[0], "|")] == [7, 23]
        assert "resumed (2 times)" in legend_of(figure)


def test_a_stall_or_a_mistimed_step_does_not_squash_the_throughput(make_run: MakeRun) -> None:
    odd = {0: 0.01, 12: 1e9}
    steps = [step(n, tokens_per_second=odd.get(n, 64.0)) for n in range(400)]
    axes = run_charts.throughput_chart(RecordedRun.load(make_run("a", steps))).axes[0]
    low, high = axes.get_ylim()
    assert (low, 64 < high < 128) == (0, True)


def test_preferences_have_a_curve_each_in_training_and_held_out(tmp_path: Path) -> None:
    run = RecordedRun.load(preference_run(tmp_path))
    [axes, *_] = PREFERENCE_CHARTS["answers-chart.png"](run).axes
    held_out = [line for line in axes.get_lines() if line.get_marker() == "s"]
    assert [float(np.asarray(line.get_ydata())[1]) for line in held_out] == [-6.0, -7.0]


def test_the_reward_chart_shows_held_out_items_beside_the_start(tmp_path: Path) -> None:
    parts = {"correct": 0.5, "brief": 0.1}
    steps = [policy_steps.step(number, rewards=parts) for number in range(30)]
    start, first, last = map(policy_steps.validation, (0.3, 0.35, 0.8))
    steps[0] = policy_steps.step(0, rewards=parts, start_validation=start, validation=first)
    steps[20] = policy_steps.step(20, rewards=parts, validation=last)
    run = RecordedPolicyRun.load(policy_run(tmp_path / "run", steps))
    figure = run_charts.reward_chart(run)
    wanted = {"pass@1 on held-out items", "95% interval of pass@1", "pass@2", "pass@1 of the start"}
    assert wanted | {"reward correct", "reward brief"} < legend_of(figure)
    assert {(0.3, 0.35, 0.8), (0.3, 0.3)} < {*map(tuple, heights(figure.axes[0]))}
    assert run.validations == [(-1, start), (0, first), (20, last)]
    places = [np.asarray(line.get_xdata()).tolist() for line in figure.axes[0].get_lines()]
    assert [-1, 0, 20] in places  # beside the rewards of steps 0 and 20


def test_groups_fill_the_chart_and_kl_is_shown_if_there_is_one(tmp_path: Path) -> None:
    steps = [policy_steps.step(number) for number in range(30)]
    run = RecordedPolicyRun.load(policy_run(tmp_path / "a", steps))
    bars: list[Any] = list(run_charts.groups_chart(run).axes[0].patches)
    assert {bar.get_y() + bar.get_height() for bar in bars} == {0.5, 0.75, 1.0}
    name = "KL divergence from the reference"
    assert name not in legend_of(POLICY_CHARTS["log-prob-chart.png"](run))
    steps = [policy_steps.step(number, kl=0.1) for number in range(2)]
    run = RecordedPolicyRun.load(policy_run(tmp_path / "b", steps))
    assert name in legend_of(POLICY_CHARTS["log-prob-chart.png"](run))


def test_time_is_drawn_by_phase_without_steps_that_compile(tmp_path: Path) -> None:
    seconds = {"sampling_seconds": 0.25, "verifying_seconds": 0.0, "updating_seconds": 0.5}
    steps = [policy_steps.step(n, step_seconds=1.0, **seconds) for n in range(4)]
    steps[0] = policy_steps.step(0, step_seconds=96.0, **seconds)
    steps[2] = policy_steps.step(2, step_seconds=40.0, resumed=True, **seconds)
    run = RecordedPolicyRun.load(policy_run(tmp_path / "run", steps))
    *lines, _ = POLICY_CHARTS["seconds-chart.png"](run).axes[0].get_lines()
    found = [np.asarray(line.get_ydata())[[1, 3]].tolist() for line in lines]
    assert found == [[0.25] * 2, [0.0] * 2, [0.5] * 2, [0.25] * 2]
    assert all(np.isnan(np.asarray(line.get_ydata())[[0, 2]]).all() for line in lines)
    validated = [
        policy_steps.step(n, step_seconds=7.0 if n % 3 else 1.0, **seconds) for n in range(300)
    ]
    run = RecordedPolicyRun.load(policy_run(tmp_path / "longer", validated))
    *_, rest = POLICY_CHARTS["seconds-chart.png"](run).axes[0].get_lines()
    np.testing.assert_allclose(np.asarray(rest.get_ydata())[1:], 4.25)
    run = RecordedPolicyRun.load(policy_run(tmp_path / "stale", steps, staleness=1))
    assert len(POLICY_CHARTS["seconds-chart.png"](run).axes[0].get_lines()) == 4


def test_a_logarithmic_axis_skips_zeros_and_norms_of_zero_are_marked(tmp_path: Path) -> None:
    steps = [policy_steps.step(n, gradient_norm=float(n != 2)) for n in range(4)]
    run = RecordedPolicyRun.load(policy_run(tmp_path / "run", steps))
    chart = run_charts.gradient_norm_chart(run)
    line = chart.axes[0].get_lines()[0]
    np.testing.assert_array_equal(line.get_data(), [[0, 1, 3], [1, 1, 1]])
    assert "zero (1 of 4 steps)" in legend_of(chart)


# Comparisons


def test_comparison_shows_each_run_over_its_own_tokens_and_time(make_run: MakeRun) -> None:
    fast = [step(n, validation_loss=None if n % 10 else 4.0) for n in range(31)]
    slow = [one | {"step_seconds": 2.0, "tokens_seen": 100 * n} for n, one in enumerate(fast[:21])]
    runs = RecordedRun.load_all([make_run("fast", fast), make_run("slow", slow)])
    for draw, ends in (
        (comparison_charts.loss_by_tokens, (992, 2000)),
        (comparison_charts.loss_by_time, (15.5, 42)),
    ):
        training, validation = draw(runs).axes
        assert [np.asarray(line.get_xdata())[-1] for line in training.get_lines()] == list(ends)
        assert [len(np.asarray(line.get_xdata())) for line in validation.get_lines()] == [4, 3]


def test_runs_that_learn_from_rewards_are_compared_by_pass_at_1(tmp_path: Path) -> None:
    start, middle, end = map(policy_steps.validation, (0.3, 0.35, 0.8))
    steps = [policy_steps.step(number) for number in range(21)]
    steps[0] = policy_steps.step(0, start_validation=start, validation=middle)
    steps[20] = policy_steps.step(20, validation=end)
    folders = [
        policy_run(tmp_path / "a", steps, steps=21),
        policy_run(tmp_path / "b", steps[:9], steps=21, learning_rate=0.01),
    ]
    result = CliRunner().invoke(charts.main, [*map(str, folders), "--output-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert comparison_charts.POLICY_COMPARISON_CHARTS.keys() <= names_in(tmp_path)
    [row, other] = [line for line in result.output.splitlines() if line.startswith(("a  ", "b  "))]
    assert row.split()[:4] == ["a", "21", "2,000", "0.500"]
    assert "30.0% (20.0% to 40.0%)  80.0% (70.0% to 90.0%)  80.0% at step 20" in row
    assert other.split()[:4] == ["b", "9", "of", "21"]
    runs = RecordedPolicyRun.load_all(folders)
    for draw, x in (
        (comparison_charts.pass_at_1_by_step, (-1, 0, 20)),
        (comparison_charts.pass_at_1_by_time, (0, 0.5, 10.5)),
    ):
        whole, part = draw(runs).axes[0].get_lines()
        assert tuple(np.asarray(whole.get_xdata())) == x
        assert tuple(np.asarray(whole.get_ydata())) == (0.3, 0.35, 0.8)
        assert tuple(np.asarray(part.get_ydata())) == (0.3, 0.35)
    table = CliRunner().invoke(charts.main, [*map(str, folders), "--table", "csv"]).output
    assert [line.split(",")[:2] for line in table.splitlines()] == [
        ["run", "pass@1"],
        ["a", "0.8"],
        ["b (9 of 21 steps)", "0.35"],
    ]
    folders += [policy_run(tmp_path / "a-seed-2", steps[:5], steps=21, seed=2)]
    table = CliRunner().invoke(charts.main, [*map(str, folders), "--table", "csv"]).output
    assert table.splitlines()[1].startswith("a (1 of 2 runs not finished),")
    trained = record_run(tmp_path / "trained", [step(0)])
    refused = CliRunner().invoke(charts.main, [str(folders[0]), str(trained)])
    assert "compare runs of one kind" in str(refused.exception)


@pytest.mark.filterwarnings("error")
def test_ten_runs_are_distinguishable_without_colour(make_run: MakeRun, tmp_path: Path) -> None:
    names = [*("_a", " a", "$x^{$"), *(f"{i}".rjust(60, "n") for i in range(7))]
    runs = RecordedRun.load_all([make_run(name, 30) for name in names])
    written = draw_comparison(runs, tmp_path / "out")
    assert {path.name for path in written} == names_in(tmp_path / "out") == COMPARISON_CHARTS.keys()
    with drawing.use_style("plain"):
        figure = comparison_charts.loss_by_step(runs)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 <= box.x1 <= 1600
    lines = figure.axes[0].get_lines()
    assert len({(line.get_linestyle(), line.get_marker()) for line in lines}) == 10
    assert len({(line.get_linestyle(), line.get_color()) for line in lines}) == 10
    texts = [text.get_text()[1:] for text in figure.legends[0].get_texts()]
    assert texts[:3] == names[:3]


def test_the_results_table_matches_the_metrics(make_run: MakeRun) -> None:
    losses = {0: 4.0, 10: 2.5, 20: 3.0}
    steps = [step(n, validation_loss=losses.get(n)) for n in range(21)]
    _, line = results_table([RecordedRun.load(make_run("a", steps))]).splitlines()
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells == ["a", "21", "672", "2.0476", "3.0000", "2.5000 at step 10", "64", "10.5 s"]


def test_the_differences_table_has_only_keys_that_differ(make_run: MakeRun) -> None:
    lineage = {"like": "runs/a", "set": {"seed": 7}}
    folders = [make_run("a", 1, weight_decay=0.01), make_run("b", 1, seed=7, lineage=lineage)]
    lines = differences_table(RecordedRun.load_all(folders)).splitlines()
    assert [line.split() for line in lines[1:]] == [["train.json", "seed", "0", "7"]]
    assert "same" in differences_table(RecordedRun.load_all(folders[:1] * 2))


def test_the_comparison_folder_names_its_runs() -> None:
    assert comparison_folder(["a", "b"]) == Path("comparisons/a+b")
    many = [f"a-run-with-a-long-name-{i}" for i in range(20)]
    assert comparison_folder(many).name.startswith("a-run-with-a-long-name-0+19-more-")
    assert comparison_folder(many) != comparison_folder([*many[:-1], "another"])


@pytest.mark.long
def test_command_redraws_one_run_and_compares_several(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_run("a", 12), make_run("b", 12, learning_rate=0.5)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(charts.main, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    run("a", "runs/a/")
    assert names_in(first) >= RUN_CHARTS
    table = run("a", "runs/b")
    assert table.splitlines()[-1].split() == ["train.json", "learning_rate", "0.01", "0.5"]
    assert names_in(tmp_path / "comparisons" / "a+b") == COMPARISON_CHARTS.keys()
    run("a", "b", "--output-dir", "out", "--style", "hand-drawn")
    assert names_in(tmp_path / "out") == COMPARISON_CHARTS.keys()
    assert not names_in(second) & RUN_CHARTS


def test_runs_are_printed_as_a_table_with_a_row_for_all_seeds(tmp_path: Path) -> None:
    losses = {"warm-seed0": 3.0, "warm-seed1": 3.2, "cold": 2.5}
    for seed, (name, loss) in enumerate(losses.items()):
        steps = [step(number, validation_loss=loss + 2 - number) for number in range(3)]
        rate = 0.01 if "warm" in name else 0.02
        record_run(tmp_path / name, steps, seed=seed, learning_rate=rate)
    folders = [str(tmp_path / name) for name in losses]
    found = {
        kind: CliRunner().invoke(charts.main, [*folders, "--table", kind]).stdout
        for kind in ("markdown", "latex", "csv")
    }
    (warm, cold) = list(csv.DictReader(found["csv"].splitlines()))
    assert (warm["run"], warm["seeds"], cold["run"], cold["seeds"]) == ("warm", "2", "cold", "1")
    assert float(warm["validation loss"]) == pytest.approx(3.1)
    assert float(warm["half_width"]) == pytest.approx(12.7062047 * 0.1)  # t of one degree
    assert "| warm | 3.1 ± 1.3 | 2 |" in found["markdown"]
    assert "warm & 3.1 $\\pm$ 1.3 & 2 &" in found["latex"]


def test_bad_input_is_reported_in_one_line(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("a", 1)
    make_run("empty", 0)
    (tmp_path / "file").write_text("")
    for arguments, reason in [
        (["gone"], "no such run"),
        (["empty"], "no step recorded"),
        (["a", "empty"], "no step recorded"),
        (["empty", "--page", "page.html"], "no step recorded"),
        (["a", "empty", "--page", "page.html"], "no step recorded"),
        (["a", "--output-dir", "file"], "file: is there and is no folder"),
    ]:
        with pytest.raises(UserError, match=reason) as error:
            charts.main.main(arguments, standalone_mode=False)
        assert len(str(error.value).splitlines()) == 1
    assert names_in(tmp_path) == {"runs", "file"}
