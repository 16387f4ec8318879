"""The power law against SciPy's regression, its intervals against simulation, and the command on
hand-written runs."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure
from scipy import stats

from rungs.cli import charts
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.optim.schedule import learning_rate_schedule
from rungs.planning import power_law
from rungs.planning.flops import model_flops_per_token
from rungs.planning.power_law import ScaledRuns
from rungs.report import drawing
from rungs.report.comparison_charts import power_law_chart
from rungs.run.metrics import StepMetrics
from rungs.run.recorded_run import RecordedRun
from rungs.run.step_table import FloatArray
from rungs.step.state import shapes_of

COMPUTE = np.geomspace(1e15, 1e18, 6)
SAMPLES = 500


def almost(share: float) -> Any:
    """Return that share of the samples, within four standard deviations of a binomial."""
    return pytest.approx(share, abs=4 * (share * (1 - share) / SAMPLES) ** 0.5)


def simulated(compute: FloatArray, bend: float = 0, noise: float = 0.02) -> list[FloatArray]:
    """Return losses along 20 · C^-0.05, bent, that scatter in logarithms."""
    rng = np.random.default_rng(7)
    x = np.log(compute)
    line = np.log(20) - 0.05 * x + bend * (x - x.mean()) ** 2
    return [np.exp(line + noise * rng.normal(size=len(x))) for _ in range(SAMPLES)]


@pytest.mark.parametrize("runs", [3, 4, 9])
def test_exponent_and_scatter_match_a_regression(runs: int) -> None:
    compute = np.geomspace(1e15, 1e18, runs)
    loss = simulated(compute)[0]
    law = power_law.fit(compute, loss)
    x, y = np.log(compute), np.log(loss)
    known = stats.linregress(x, y)
    reach = stats.t(runs - 2).interval(0.95)[1] * known.stderr
    expected = (-known.slope, -known.slope - reach, -known.slope + reach)
    assert law.exponent == pytest.approx(expected, rel=1e-9)
    assert law.coefficient == pytest.approx(np.exp(known.intercept), rel=1e-9)
    left = y - known.intercept - known.slope * x
    assert law.deviation == pytest.approx(np.sqrt((left**2).sum() / (runs - 2)), rel=1e-9)
    assert law.scatter_percent == pytest.approx(100 * np.expm1(law.deviation), rel=1e-9)
    assert (law.curvature is None) == (runs < 5)


def test_prediction_matches_the_line_and_curvature_a_parabola() -> None:
    compute = np.append(COMPUTE, [2e18, 3e18])
    loss = simulated(compute)[1]
    law = power_law.fit(compute, loss)
    assert law.predict(1e19).value == pytest.approx(law.coefficient * 1e19**-law.exponent.value)
    assert law.curvature is not None
    x = np.log(compute)
    known, covariance = np.polyfit(x - x.mean(), np.log(loss), 2, cov=True)
    reach = stats.t(len(x) - 3).ppf(0.975) * covariance[0, 0] ** 0.5
    expected = (known[0], known[0] - reach, known[0] + reach)
    assert law.curvature == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("runs", [3, 6])
def test_intervals_contain_the_truth_95_percent_of_the_time(runs: int) -> None:
    compute, new = np.geomspace(1e15, 1e18, runs), 1e19
    laws = [power_law.fit(compute, loss) for loss in simulated(compute)]
    assert np.mean([law.exponent.low <= 0.05 <= law.exponent.high for law in laws]) == almost(0.95)
    rng = np.random.default_rng(8)
    further = 20 * new**-0.05 * np.exp(0.02 * rng.normal(size=SAMPLES))
    predictions = [law.predict(new) for law in laws]
    hit = [one.low <= loss <= one.high for one, loss in zip(predictions, further, strict=True)]
    assert np.mean(hit) == almost(0.95)


def test_a_bend_is_found_and_seldom_invented() -> None:
    straight = [power_law.fit(COMPUTE, loss).bends for loss in simulated(COMPUTE)]
    assert np.mean(straight) == almost(0.05)
    for bend in (0.005, -0.005):
        laws = [power_law.fit(COMPUTE, loss) for loss in simulated(COMPUTE, bend, 0.005)]
        found = [law.bends and law.curvature.value * bend > 0 for law in laws if law.curvature]
        assert np.mean(found) > 0.99


def test_a_floor_of_the_loss_bends_the_points_upward() -> None:
    law = power_law.fit(COMPUTE, 1.7 + 400 * COMPUTE**-0.15)
    assert law.bends
    assert law.curvature is not None
    assert law.curvature.value > 0


@pytest.mark.filterwarnings("error")
def test_an_interval_may_be_infinite() -> None:
    law = power_law.fit([1, 1.4, 2], [1e-200, 1e200, 1e-200])
    prediction = law.predict(20)
    assert (prediction.low, prediction.high) == (0, np.inf)


@pytest.mark.parametrize(
    ("compute", "line"),
    [
        ([1e15, 1e16], "different amounts of compute: 2; a power law needs 3 or more"),
        ([1e15, 1e15, 1e16], "different amounts of compute: 2"),
        ([1e15] * 4, "different amounts of compute: 1"),
        ([1e15, 1.2e15, 1.9e15], "the largest compute is 1.9 times the smallest"),
    ],
)
def test_too_few_or_too_close_runs_are_rejected(compute: list[float], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        power_law.fit(compute, [3.0] * len(compute))


def test_an_estimate_is_printed_to_two_digits_of_its_interval() -> None:
    for value, half, expected in [
        (0.05731, 0.0082, "0.0573 ± 0.0082"),
        (0.1218, 0.5731, "0.12 ± 0.57"),
        (0.05, 12.34, "0.05 ± 12.34"),
        (0.05, 0, "0.0500000 ± 0.0000000"),
    ]:
        assert str(power_law.Estimate(value, value - half, value + half)) == expected


STEPS = 40
TOKENS_PER_STEP = 64
WIDTHS = (16, 32, 64, 96, 128)
MakeRun = Callable[..., Path]


def config_of(width: int, **train: Any) -> RunConfig:
    model = {"vocab_size": 64, "context_length": 16, "emb_dim": width, "n_layers": 2, "n_heads": 2}
    plain = {"dataset": "books", "microbatch_size": 4, "learning_rate": 0.01}
    return RunConfig(
        ModelConfig.model_validate(model),
        TrainConfig.model_validate({**plain, "checkpoint_interval": 10, **train}),
    )


@functools.cache
def flops_of(width: int) -> float:
    model = config_of(width).model
    return model_flops_per_token(shapes_of(model), model, 16) * TOKENS_PER_STEP * STEPS


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Make runs under runs/ that end near 20 · C^-0.05, or at `end`; their best loss is lower."""
    monkeypatch.chdir(tmp_path)

    def make(width: int, name: str = "", end: Any = 0, stop: int = STEPS, **train: Any) -> Path:
        config = config_of(width, **train)
        folder = tmp_path / "runs" / (name or f"w{width}")
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(config.model.as_json()))
        (folder / "train.json").write_text(json.dumps(config.train.as_json()))
        rates = learning_rate_schedule(config.train, STEPS)
        last = 20 * flops_of(width) ** -0.05 * (1 + 0.003 * (width % 3)) if end == 0 else end
        losses = {0: 4.2, 10: 3.9, 20: 0.99 * last if last else last, STEPS - 1: last}
        lines = [
            StepMetrics(
                global_step=n,
                tokens_seen=TOKENS_PER_STEP * (n + 1),
                train_loss=4.0,
                learning_rate=float(rates(n)),
                gradient_norm=0.5,
                clipped=False,
                dropped_microbatches=0,
                step_seconds=0.5,
                tokens_per_second=128.0,
                validation_loss=losses.get(n) if last else None,
            ).as_line()
            for n in range(stop)
        ]
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return make


def text_of(folders: list[Path]) -> str:
    return ScaledRuns.of(RecordedRun.load_all(folders)).as_text()


def test_the_command_fits_final_losses_over_compute(make_run: MakeRun) -> None:
    folders = [make_run(width) for width in WIDTHS]
    run = CliRunner().invoke(charts.main, ["--power-law", *map(str, folders)])
    assert run.exit_code == 0
    lines = run.stdout.splitlines()
    ends = [20 * flops_of(width) ** -0.05 * (1 + 0.003 * (width % 3)) for width in WIDTHS]
    law = power_law.fit([flops_of(width) for width in WIDTHS], ends)
    prediction = law.predict(10 * flops_of(128))
    text = "\n".join(lines[lines.index("") :])
    assert f"loss = {law.coefficient:.6g} · C^-{law.exponent.value:.6g}, C in FLOPs" in text
    assert f"{prediction.value:.4g} at {10 * flops_of(128):.3g} FLOPs" in text
    assert f"95% interval {prediction.low:.4g} to {prediction.high:.4g}" in text
    assert f"scatter     {law.scatter_percent:.2g}% of the loss" in text
    assert "No curvature found" in text
    assert "not finished" not in text
    drawn = Path("comparisons") / "+".join(folder.name for folder in folders)
    assert lines[0] == str(drawn / "power-law-chart.png")
    assert (drawn / "power-law-chart.png").is_file()


def test_three_runs_are_reported_as_few(make_run: MakeRun) -> None:
    text = text_of([make_run(16, end=4.0), make_run(32, end=2.0), make_run(64, end=3.0)])
    assert "3 runs leave 1 degree of freedom, so the intervals are wide" in text
    assert "The exponent may be 0" in text


@pytest.mark.parametrize(
    ("bend", "line"),
    [
        (0.005, "the points bend upward, so the line's predictions beyond them are too low"),
        (-0.005, "the points bend downward, so the line's predictions beyond them are too high"),
    ],
)
def test_a_bend_is_reported_with_its_direction(make_run: MakeRun, bend: float, line: str) -> None:
    x = {width: np.log(flops_of(width) / flops_of(16)) for width in WIDTHS}
    ends = {width: np.exp(1.3 - 0.05 * x[width] + bend * x[width] ** 2) for width in WIDTHS}
    folders = [make_run(width, end=end) for width, end in ends.items()]
    assert f"Not a power law: {line} (coefficient of log² C: {bend:.7f}" in text_of(folders)
    figure = power_law_chart(ScaledRuns.of(RecordedRun.load_all(folders)))
    assert figure.axes[0].get_title().splitlines()[1:] == [line]


def test_an_unfinished_run_is_reported_and_drawn_hollow(make_run: MakeRun) -> None:
    folders = [make_run(width) for width in WIDTHS[:3]]
    folders.append(make_run(96, stop=STEPS - 3))
    lines = [line for line in text_of(folders).splitlines() if "not finished" in line]
    assert [line.split()[0] for line in lines] == ["w96"]
    scaled = ScaledRuns.of(RecordedRun.load_all(folders))
    assert scaled.runs[3].end[0] == pytest.approx(flops_of(96) * 21 / STEPS)
    figure = power_law_chart(scaled)
    hollow = [m.get_label() for m in markers(figure) if m.get_markerfacecolor() == "white"]
    assert len(hollow) == 1
    assert " w96 (not finished)" in [t.get_text() for t in figure.legends[0].get_texts()]


def test_a_run_of_one_step_is_not_finished(make_run: MakeRun) -> None:
    folders = [make_run(width, stop=1, warmup_period_percent=0) for width in WIDTHS[:3]]
    assert text_of(folders).count("not finished") == 3


def test_a_constant_learning_rate_counts_as_finished(make_run: MakeRun) -> None:
    folders = [make_run(width, stop=30, schedule="constant") for width in WIDTHS[:3]]
    assert "not finished" not in text_of(folders)


def test_what_the_fit_does_not_account_for_is_reported(make_run: MakeRun) -> None:
    folders = [make_run(width) for width in WIDTHS[:2]]
    folders.append(make_run(64, start_from="imported", validation_tokens=1000, sequence_length=8))
    lines = text_of(folders).splitlines()[-3:]
    assert lines[0].startswith("w64 starts from other weights")
    assert lines[1].startswith("sequence_length differs (16, 8)")
    assert lines[2].startswith("validation_tokens differs (524288, 1000)")


def test_unsuitable_runs_are_rejected_and_nothing_is_written(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for width in WIDTHS[:3]:
        make_run(width)
    make_run(64, "other", dataset="novels")
    make_run(64, "mixed", dataset={"novels": 1, "books": 2})
    make_run(64, "copies", target_offset=0)
    make_run(64, "unseen", end=None)
    for names, lines in [
        (["w16", "w32"], ["needs 3 runs or more; 2 given"]),
        (["w16", "w32", "mixed"], ['dataset differs ("books", {"books": 2.0, "novels": 1.0})']),
        (["w16", "w32", "copies"], ["target_offset differs (1, 0)"]),
        (["w16", "other", "unseen"], ["dataset differs", "unseen has no validation loss"]),
    ]:
        with pytest.raises(UserError) as error:
            charts.main.main(["--power-law", *names], standalone_mode=False)
        found = str(error.value).splitlines()
        assert len(found) == len(lines)
        for line, start in zip(found, lines, strict=True):
            assert line.startswith(f"--power-law: {start}")
    assert not (tmp_path / "comparisons").exists()


def test_a_loss_of_zero_is_rejected(make_run: MakeRun) -> None:
    folders = [make_run(width) for width in WIDTHS[:3]]
    *runs, odd = RecordedRun.load_all(folders)
    odd.column("validation_loss")[-1] = 0
    with pytest.raises(UserError, match=r"w64 ends at loss .* needs both above 0"):
        ScaledRuns.of([*runs, odd])


def markers(figure: Figure) -> list[Any]:
    return [line for line in figure.axes[0].get_lines() if line.get_marker() != "None"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ends", [{}, {16: 4.0, 32: 2.0, 64: 3.0}], ids=["narrow", "wide"])
def test_the_chart_shows_runs_law_and_interval(make_run: MakeRun, ends: dict[int, float]) -> None:
    folders = [make_run(width, end=ends.get(width, 0)) for width in WIDTHS[:3]]
    scaled = ScaledRuns.of(RecordedRun.load_all(folders))
    with drawing.use_style("plain"):
        figure = power_law_chart(scaled)
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
    axes: Any = figure.axes[0]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert [m.get_xydata()[0].tolist() for m in markers(figure)] == [
        pytest.approx(run.end) for run in scaled.runs
    ]
    for compute, loss in (run.end for run in scaled.runs):
        assert left < compute < right
        assert bottom < loss < top
    assert "1e8" in [text.get_text() for text in axes.get_xticklabels()]
    solid, dashed = axes.get_lines()[-2:]
    largest = flops_of(64)
    assert solid.get_xdata()[-1] <= largest * 1.0001 < dashed.get_xdata()[-1]
    assert dashed.get_xdata()[-1] == pytest.approx(10 * largest)
    assert dashed.get_ydata()[-1] == pytest.approx(scaled.prediction.value)
    band = axes.collections[0].get_paths()[0].get_extents()
    assert band.y0 == pytest.approx(max(scaled.prediction.low, bottom))
    assert (band.y1 >= top * 0.9999) == bool(ends)
    assert 0 <= box.x0 < box.x1 <= 1600
    for low, high, ticks in (
        (left, right, axes.get_xticks()),
        (bottom, top, axes.get_yticks()),
    ):
        assert 3 <= sum(low <= tick <= high for tick in ticks) <= 9
