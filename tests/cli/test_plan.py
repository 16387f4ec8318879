"""`plan.py` as a user runs it, and the figures of its plans."""

from rungs.common.command import run_command

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rungs.cli import plan
from rungs.cli.plan import parse_sharding
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.common.shown_text import format_bytes
from rungs.config import run_config
from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.parallel import target_device
from rungs.parallel.gpu_settings import SHARE_VARIABLES
from rungs.parallel.sharding import TENSOR
from rungs.planning import flops, forecast, hardware, report
from rungs.planning.communication import abstract_layout, planned_collectives
from rungs.run import metrics, records
from rungs.run.folder import RunFolder
from tests.support.commands import run_script
from tests.support.committed_runs import ROOT
from tests.support.configs import model_config
from tests.support.long import long_except
from tests.support.tiny_run import MODEL, change, make_dataset, make_run, train

NOWHERE = Path("nowhere")
TINY_TOKENS = 24 * 128
pytestmark = pytest.mark.usefixtures("shared_traces")


PLANNED_RUNS = ["mixtral", "a-to-a", "recipe", "student"]
"""Committed runs that differ in what a plan counts; the first is not long."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what the command changes in the environment."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name in SHARE_VARIABLES:
        monkeypatch.setenv(name, "")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(plan.main, list(map(str, arguments)))


def planned(
    run: RunFolder, device: str = "h100", sharding: str = "dp:1", **options: Any
) -> forecast.Forecast:
    options = {"datasets_dir": run.path.parent / "datasets", "utilization": 0.4, **options}
    parts = hardware.device_by_name(device), parse_sharding(sharding)
    return forecast.forecast(run, run_config.load_run(run.path), *parts, **options)


def as_text(run: RunFolder, found: forecast.Forecast) -> str:
    return report.as_text(run, found)


def as_json(found: forecast.Forecast) -> Any:
    return json.loads(report.as_json(found))


@pytest.mark.parametrize("name", long_except(PLANNED_RUNS[:1], PLANNED_RUNS))
def test_committed_runs_are_planned(name: str) -> None:
    run = RunFolder(ROOT / "runs" / name)
    found = planned(run, datasets_dir=NOWHERE)
    assert report.fits(found)
    text = as_text(run, found)
    assert text.endswith("It fits.")
    assert "not here yet; uv run download_dataset.py" in text
    assert as_json(found)["fits"] is True


def test_figures_of_gpt2_small() -> None:
    found = planned(RunFolder(ROOT / "runs/gpt2-small"), datasets_dir=NOWHERE)
    assert found.parameters.total == 163_009_536
    assert found.tokens.planned == 33_165 * 98_304
    assert found.tokens_per_parameter == pytest.approx(20, abs=0.01)
    assert found.disk.checkpoint_bytes == pytest.approx(3 * 4 * 163_009_536, rel=1e-6)
    assert found.disk.checkpoints == 5
    assert found.throughput is not None
    at_peak = 494.7e12 / found.model_flops_per_token  # in float32, as in all tests
    assert found.throughput.tokens_per_second == pytest.approx(0.4 * at_peak)
    assert found.seconds_left == pytest.approx(33_165 * 98_304 / (0.4 * at_peak))


@pytest.mark.long
def test_a_plan_in_fp8_counts_its_state_and_says_below_which_size_it_does_not_pay(
    tmp_path: Path,
) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", compute_dtype="bfloat16")
    plain = planned(run)
    change(run, matmul_dtype="float8")
    found = planned(run)
    layers = found.config.model.n_layers
    linears = found.parameters.attention + found.parameters.feed_forward
    more = found.memory.moments - plain.memory.moments
    assert more % (layers * 3 * 16 * 4) == 0
    assert more > 0
    # a byte for each element of a kernel, of which there are fewer than parameters
    assert 0.9 * linears < found.memory.gathered - plain.memory.gathered <= linears
    assert found.speed is not None
    assert plain.speed is not None
    assert 1 < found.speed.flops / plain.speed.flops < 2
    text = as_text(run, found)
    assert "FP8 doesn't pay below about 1,000,000,000 parameters" in text
    assert "matmuls of the blocks in FP8" in text
    assert "FP8" not in as_text(run, plain)
    for device, reason in (("a100", "this one has 8.0"), ("tpu-v5e", "only NVIDIA GPUs")):
        refused = command(run.path, "--device", device, "--datasets-dir", tmp_path / "datasets")
        assert refused.exit_code != 0
        assert isinstance(refused.exception, UserError)
        assert 'train.json: matmul_dtype: "float8": ' in str(refused.exception)
        assert reason in str(refused.exception)


def test_the_command_prints_a_table_and_writes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_dataset(tmp_path / "datasets")
    where = ("--sharding", "dp:1", "--device", "a100", "--datasets-dir", tmp_path / "datasets")
    found = command(run.path, *where)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == f"{run.path} on 1 × a100; float32, optimizer adamw, schedule cosine"
    assert "step      4 sequences × 2 microbatches × 16 tokens = 128 tokens" in lines
    assert f"run       24 steps × 128 = {TINY_TOKENS:,} tokens" in lines
    assert "dataset   tiny: 20,000 tokens" in lines
    assert lines[-1] == "It fits."
    assert sorted(path.name for path in run.path.iterdir()) == ["model.json", "train.json"]


def test_json_has_the_same_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    where = ("--sharding", "dp:1", "--device", "h100", "--datasets-dir", tmp_path)
    found = command(run.path, "--json", *where)
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    assert content["device"] == "h100"
    assert content["sharding"] == {"mode": "dp", "data": 1, "tensor": 1}
    assert content["tokens"]["in_datasets"] == {"tiny": None}
    assert content["tokens"]["planned"] == TINY_TOKENS
    sizes = content["parameters"]
    assert sum(sizes.values()) == 2 * sizes["total"]
    assert content["usable_bytes_per_device"] == pytest.approx(0.9 * 84.94e9, rel=1e-3)
    assert content["throughput"]["tokens_per_second"] > 0


@pytest.mark.long
def test_too_little_memory_is_exit_code_1_with_edits_that_fit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", microbatch_size=64, gradient_accumulation_steps=1)
    need = planned(run).memory.total
    device = f"small:1e12:{need * 0.8}:1e12"
    found = command(run.path, "--device", device, "--datasets-dir", tmp_path)
    assert found.exit_code == 1
    assert not found.stderr
    assert "It does not fit into memory:" in found.stdout
    assert '"microbatch_size": 32, "gradient_accumulation_steps": 2  (' in found.stdout
    enough = f"large:1e12:{need}:1e12"
    assert command(run.path, "--device", enough, "--datasets-dir", tmp_path).exit_code == 0


@pytest.mark.long
def test_too_little_disk_space_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    needed = planned(run, "cpu").disk.needed_bytes
    usage = disk.shutil.disk_usage(tmp_path)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(
            disk.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free)
        )
        found = planned(run, "cpu")
        assert found.fits_memory
        assert report.fits(found) == fits
    text = as_text(run, found)
    assert "It fits into memory.\nIts checkpoints do not fit on the disk" in text


def test_a_run_with_minutes_has_the_steps_that_fit_or_those_it_decided_on(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", epochs=1000, max_minutes=2)
    throughput = forecast.Throughput(128 * 5, "given")
    found = planned(run, throughput=throughput)
    assert (found.tokens.steps, found.seconds_left) == (2 * 60 * 5, 120)
    assert "an estimate for max_minutes 2; the first steps decide" in as_text(run, found)
    records.append(run, [records.Length(time=records.now(), step=9, total_steps=580)])
    assert planned(run, throughput=throughput).tokens.steps == 580
    change(run, epochs=1)
    assert planned(run, throughput=throughput).tokens.steps == 24


def test_a_gpu_is_proposed_the_largest_microbatch_that_fits(tmp_path: Path) -> None:
    keys = {"microbatch_size": 2, "gradient_accumulation_steps": 6, "sharding": None}
    run = make_run(tmp_path / "run", **keys)
    found = planned(run, "h100")
    assert 'faster, with the same global batch: "microbatch_size": 12' in as_text(run, found)
    larger = as_json(found)["larger_microbatch"]
    assert larger == {"microbatch_size": 12, "gradient_accumulation_steps": 1}
    assert found._replace(usable_bytes=found.memory.total).larger_microbatch() is None
    tpu = hardware.device_by_name("tpu-v5e")
    assert found._replace(hardware=tpu).larger_microbatch() is None
    experts = model_config(n_experts=4, experts_per_token=2)
    of_experts = found._replace(config=found.config._replace(model=experts))
    assert of_experts.larger_microbatch() is None
    whole = found.config.train.model_copy(update=larger)
    whole_step = found._replace(config=found.config._replace(train=whole))
    assert whole_step.larger_microbatch() is None
    larger_step = whole_step.larger_step()
    assert larger_step is not None
    on_tpu = whole_step._replace(hardware=tpu)
    assert on_tpu.larger_step() is not None
    size = larger_step.keys["microbatch_size"]
    of_memory = f"({format_bytes(larger_step.memory.total)} ± 30%)"
    shown = as_text(run, whole_step)
    assert f"there is memory for {size:,} sequences in a step {of_memory}\nIt fits." in shown
    for more, fits in ((0, True), (1, False)):
        edited = whole.model_copy(update={"microbatch_size": size + more * whole.microbatch_size})
        memory = forecast.memory_on_same_devices(whole_step, found.config._replace(train=edited))
        assert (memory.total <= 0.9 * found.usable_bytes) is fits


def test_a_plan_says_what_its_error_and_assumptions_hide(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=10**6, start_from="runs/elsewhere")
    found = planned(run, "h100", datasets_dir=NOWHERE)
    shown = as_text(run, found)
    assert "\nits start_from, runs/elsewhere, isn't here\n" in shown
    assert "          2.0 MB of disk, if no token is read twice\n" in shown  # 2 bytes a token
    assert " ms; such short ones take longer" in shown
    measured = planned(run, "h100", throughput=forecast.Throughput(1e9, "measured"))
    assert "such short ones" not in as_text(run, measured)
    for share, fits in ((1.31, "It fits."), (1.29, "It fits, but not with the estimate's error")):
        tight = found._replace(usable_bytes=found.memory.total * share)
        assert as_text(run, tight).splitlines()[-1].startswith(fits)


def test_the_disk_of_this_machine_does_not_count_for_devices_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = disk.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=0))
    run = make_run(tmp_path / "run")
    found = planned(run)
    assert report.fits(found)
    assert "free space where it will run: not known" in as_text(run, found)
    assert as_json(found)["disk"]["free_bytes"] is None


@pytest.mark.parametrize("start_from", [None, "imported"])
def test_only_training_from_scratch_has_a_compute_optimal_length(
    start_from: str | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", start_from=start_from)
    found = planned(run, "h100", "dp:2", throughput=forecast.Throughput(3600.0, "given"))
    text = as_text(run, found._replace(price_per_device_hour=100))
    line = re.search(
        r"compute-optimal: 20 per parameter = ([\d,]+) tokens, .+, cost ([\d,.]+)\n", text
    )
    assert (line is not None) == (start_from is None)
    if line:
        tokens, cost = (float(each.replace(",", "")) for each in line.groups())
        assert cost == pytest.approx(tokens / 3600 / 3600 * 2 * 100, abs=0.01)


@pytest.mark.parametrize(
    ("keys", "checkpoints"),
    [
        ({}, 5),  # that of step 0, the best, the newest two, one being written
        ({"keep_checkpoints": 1}, 4),  # the newest is deleted only once the next is complete
        ({"keep_checkpoints": -1}, 6),  # at steps 0, 5, 10, 15, 20 and the last, 23
        ({"checkpoint_interval": 100}, 2),
        ({"keep_checkpoints": -1, "min_train_tokens": -1}, None),
    ],
)
def test_most_checkpoints_at_the_same_time(
    keys: dict[str, Any], checkpoints: int | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", **keys)
    assert planned(run).disk.checkpoints == checkpoints


def test_steps_are_unknown_if_they_depend_on_a_missing_dataset(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=-1)
    found = planned(run)
    assert (found.tokens.steps, found.tokens.planned, found.seconds_left) == (None, None, None)
    assert found.throughput is not None
    text = as_text(run, found)
    assert "all tokens of the dataset, whose number is not known yet" in text
    assert "not here yet; uv run download_dataset.py --text FILE --name tiny" in text
    longer = make_run(tmp_path / "longer", min_train_tokens=-1, max_steps=1000)
    assert planned(longer).tokens.planned == 1000 * 128
    assert "run       at most 1,000 steps" in as_text(longer, planned(longer))
    make_dataset(tmp_path / "datasets")
    assert planned(run).tokens.steps == (20_000 - 1) // 16 // 8
    shortage = "max_steps is 1,000, but the epochs end before; raise"
    assert f"{shortage} epochs" in as_text(longer, planned(longer))
    assert shortage not in as_text(run, planned(run))
    change(longer, min_train_tokens=256)
    assert f"{shortage} min_train_tokens or epochs" in as_text(longer, planned(longer))
    change(longer, max_minutes=1)
    assert shortage not in as_text(longer, planned(longer))


@pytest.mark.long
def test_a_small_step_is_limited_by_memory_bandwidth(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    fast, slow = (planned(run, f"mine:1e15:1e9:{bandwidth}") for bandwidth in (1e15, 1e6))
    assert fast.throughput is not None
    assert "TFLOP/s" in fast.throughput.reason
    assert slow.throughput is not None
    assert slow.throughput.reason == "limited by memory bandwidth"
    moved = 7 * slow.memory.weights  # weights and moments read and written, and the gradient
    assert slow.throughput.tokens_per_second == pytest.approx(128 * 1e6 / moved, rel=0.01)


def test_communication_takes_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    alone, both = planned(run), planned(run, sharding="fsdp:2")
    with target_device.trace_for(target_device.Target("gpu", "9.0")):
        sent = planned_collectives(both.config, abstract_layout(both.sharding))
    waiting = overlapping = 0.0
    for one in sent:
        seconds = one.moved_bytes / 450e9  # NVLink, in one direction
        if one.axes == (TENSOR,) or one.kind == "all-to-all":  # the latter of embeddings
            waiting += seconds
        else:
            overlapping += seconds
    assert waiting > 0
    assert overlapping > 0
    assert alone.speed is not None
    step_flops = alone.model_flops_per_token * alone.tokens.per_step
    seconds = max(step_flops / (2 * alone.speed.flops) + waiting, overlapping)
    assert both.speed is not None
    assert both.speed.flops == pytest.approx(step_flops / seconds)
    assert both.speed.flops < 1.5 * alone.speed.flops
    assert "assuming 40% of 2 ×" in both.speed.reason
    content = as_json(both)["communication_seconds_per_step"]
    assert content == {"tensor": pytest.approx(waiting), "data": pytest.approx(overlapping)}
    assert "s of weights and gradients" in as_text(run, both)


def test_a_plan_says_which_part_of_the_sequences_a_device_has(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shown = as_text(run, planned(run, "tpu-v5e", "cp:2x2"))
    assert "4 × tpu-v5e, cp: data 2 × context 2; " in shown
    assert "2 sequences of each microbatch per device, 8 tokens of each" in shown


def test_communication_that_is_not_counted_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    found = planned(run, "mine:1e15:1e9:1e12", "dp:2")
    assert found.communication is None
    (line,) = [line for line in as_text(run, found).splitlines() if "not counted" in line]
    assert "the links of mine are not known" in line


def test_the_share_that_jax_takes_of_a_gpu_is_shown_with_what_changes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = as_text(run, planned(run))
    assert "JAX takes 90% of 84.94 GB; XLA_CLIENT_MEM_FRACTION changes that" in text


@pytest.mark.long
def test_on_a_cpu_the_time_is_known_after_some_steps(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run")
    where = ("--datasets-dir", tmp_path / "datasets")
    before = command(run.path, *where)
    assert f"time      not known: {report.UNKNOWN_SPEED}" in before.stdout
    given = command(run.path, *where, "--tokens-per-second", 64)
    assert "time      48 s at 64 tokens per second (as given)" in given.stdout
    record_steps(run, 24)
    after = command(run.path, *where)
    throughput = forecast.recorded_throughput(run)
    assert throughput is not None
    recorded = (
        f"{throughput.tokens_per_second:,.0f} tokens per second (as in the run's latest steps)"
    )
    assert f"time      0 s left at {recorded}" in after.stdout
    hour = 3600 * throughput.tokens_per_second * planned(run).model_flops_per_token
    assert f"          one hour is {hour:.1e} FLOPs" in after.stdout
    for option in (("--utilization", 90), ("--sharding", "dp:4")):
        assert "latest steps" not in command(run.path, *where, *option).stdout
    assert "          3,072 tokens are already done" in after.stdout


def record_steps(run: RunFolder, count: int) -> None:
    """Write the metrics that training would write, slower at first."""
    steps = [
        metrics.StepMetrics(
            global_step=step,
            tokens_seen=128 * (step + 1),
            train_loss=4.0,
            learning_rate=0.01,
            gradient_norm=0.5,
            clipped=False,
            dropped_microbatches=0,
            step_seconds=1.0,
            tokens_per_second=10.0 if step < 2 else 6000.0 + step,
            validation_loss=None,
        )
        for step in range(count)
    ]
    run.metrics.write_text("".join(step.as_line() for step in steps))


@pytest.mark.long
def test_training_logs_the_size_of_the_run_and_records_what_plans_read(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", drop_rate=0.0)
    trained = train(run, tmp_path / "datasets")
    assert trained.returncode == 0, trained.stderr
    size = planned(run).parameters.total
    in_short = f"{size:,} parameters, 0.2 MFLOPs per token; 3,072 tokens, {3072 / size:.3g} per"
    assert in_short in trained.stderr
    assert f"more: uv run plan.py {run.path}" in trained.stderr
    assert len(metrics.read(run.metrics)) == 24
    throughput = forecast.recorded_throughput(run)
    assert throughput is not None
    after = command(run.path, "--datasets-dir", tmp_path / "datasets").stdout
    assert f"{throughput.tokens_per_second:,.0f} tokens per second" in after
    assert "          3,072 tokens are already done" in after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sharding", "dp"], "--sharding dp: give it as dp:8"),
        (["--sharding", "dp:0"], "--sharding dp:0: needs at least one device"),
        (["--sharding", "dp:2x2"], "mode 'dp' needs tensor 1, not 2"),
        (["--sharding", "dp:3"], "microbatch_size: 4 is not divisible by the 3 devices"),
        (["--sharding", "tp:4"], "n_heads: 2 is not divisible by the 4 devices"),
        (["--sharding", "cp:4"], "n_heads: 2 is not divisible by the 4 devices"),
        (["--sharding", "cp:3"], "sequence_length: 16 is not divisible by the 3 devices"),
        (["--sharding", "cp:4x1"], "mode 'cp' needs context of at least 2; or use mode 'fsdp'"),
        (["--device", "h1"], "--device h1: unknown device; choose from h100"),
    ],
)
def test_bad_options_are_reported_in_one_line(
    options: list[str], message: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    result = command(run.path, *options)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_a_run_on_all_devices_needs_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", sharding={"mode": "fsdp"})
    line = ["plan.py", run.path, "--device", "h100", "--datasets-dir", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, line)))
    with pytest.raises(SystemExit) as ended:
        run_command(plan.main)
    assert ended.value.code == 2
    assert "uses all devices; give their number with --sharding" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_for_this_machine_names_idle_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", microbatch_size=6)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    found = command(run.path, "--datasets-dir", tmp_path)
    assert found.exit_code == 0
    assert found.stderr.startswith("warning: 2 of 8 devices are idle: microbatch_size 6 is not")
    assert "on 6 ×" in found.stdout


def test_data_problems_are_reported_as_in_training(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", min_train_tokens=10**9)
    with pytest.raises(UserError, match=r"run/train.json: min_train_tokens: 1000000000 needs"):
        planned(run)
    long = make_run(tmp_path / "long", sequence_length=17)
    with pytest.raises(UserError, match=r"long/train.json: sequence_length: 17 is longer"):
        planned(long)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp:8", ("dp", 8, 1)),
        ("fsdp:64", ("fsdp", 64, 1)),
        ("tp:4", ("tp", 1, 4)),
        ("tp:1x4", ("tp", 1, 4)),
        ("fsdp_tp:4x2", ("fsdp_tp", 4, 2)),
        ("cp:8", ("cp", 1, 8)),
        ("cp:2x4", ("cp", 2, 4)),
    ],
)
def test_parse_sharding(text: str, sizes: tuple[Mode, int, int]) -> None:
    mode, *of_mesh = sizes
    last = "context" if mode == "cp" else "tensor"
    expected = {"mode": mode, "data": of_mesh[0], last: of_mesh[1]}
    assert parse_sharding(text) == ShardingConfig.model_validate(expected)


@pytest.mark.long
def test_the_price_of_a_run_is_that_of_its_device_hours(tmp_path: Path) -> None:
    """24 steps of 128 tokens at 0.1 tokens per second take 8.53 hours on two devices."""
    run = make_run(tmp_path / "run")
    speed = (run.path, "--device", "h100", "--sharding", "dp:2", "--tokens-per-second", "0.1")
    priced = command(*speed, "--price-per-hour", "2.49").stdout
    assert "cost      42.50; an hour costs 4.98 and trains 360 tokens, without validation" in priced
    found = json.loads(command(*speed, "--price-per-hour", "2.49", "--json").stdout)
    assert found["price_per_device_hour"] == 2.49
    assert found["cost_left"] == pytest.approx(TINY_TOKENS / 0.1 / 3600 * 2 * 2.49)
    assert "cost" not in command(*speed).stdout
    assert json.loads(command(*speed, "--json").stdout)["cost_left"] is None


@pytest.mark.parametrize(
    ("device", "cost"), [("h100", " without validations"), ("cpu", "not known, as the time is not")]
)
def test_reinforcement_learning_has_a_price(device: str, cost: str) -> None:
    priced = ("--device", device, "--sharding", "dp:1", "--price-per-hour", "2.49")
    [line] = re.findall("cost .*", command(ROOT / "runs/parity-rl", *priced).stdout)
    assert cost in line
    assert line.endswith("; an hour costs 2.49")


def test_the_virtual_devices_of_a_cpu_have_one_price(tmp_path: Path) -> None:
    speed = forecast.Throughput(0.1, "given")
    found = planned(make_run(tmp_path / "run"), "cpu", "dp:2", throughput=speed)
    found = found._replace(price_per_device_hour=1)
    assert found.cost_left == pytest.approx(TINY_TOKENS / 360)
    gpus = found._replace(hardware=hardware.device_by_name("h100"))
    assert gpus.cost_left == pytest.approx(2 * TINY_TOKENS / 360)


def test_a_cost_that_is_not_known_is_said_in_one_line_with_the_reason(tmp_path: Path) -> None:
    priced = ("--device", "cpu", "--sharding", "dp:1", "--price-per-hour", "1")
    run = make_run(tmp_path / "run")
    shown = command(run.path, *priced).stdout
    assert f"time      not known: {report.UNKNOWN_SPEED}\ncost      not known, as the" in shown
    endless = make_run(tmp_path / "all", min_train_tokens=-1)
    shown = command(endless.path, *priced, "--tokens-per-second", "1").stdout
    assert "cost      not known, as the number of tokens is not; an hour costs 1.00" in shown


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("runs/layers", ["--price-per-hour=nan"], "--price-per-hour"),
        ("runs/layers", ["--price-per-hour=-1"], "--price-per-hour"),
        ("runs/layers", ["--ladder=1e15", "--price-per-hour=1"], "leave out --ladder"),
        ("runs/parity-rl", ["--tokens-per-second=1"], "not for runs of reinforcement learning"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(
    run: str, options: list[str], message: str
) -> None:
    ended = run_script("plan.py", run, "--device", "h100", *options)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert message in ended.stderr


def test_a_teacher_beside_the_steps_takes_its_forward_pass(tmp_path: Path) -> None:
    large, run = make_run(tmp_path / "large"), make_run(tmp_path / "run")
    (large.path / "model.json").write_text(json.dumps({**MODEL, "n_layers": 3, "emb_dim": 64}))
    alone = planned(run)
    change(run, objective="distill", teacher=str(large.path))
    beside, teacher = planned(run), run_config.load_run(large.path)
    forward = beside.teacher_flops_per_token
    assert forward == pytest.approx(flops.training_flops_per_token(teacher) / 3)
    assert beside.model_flops_per_token == pytest.approx(alone.model_flops_per_token + forward)
    assert beside.throughput is not None
    assert alone.throughput is not None
    assert beside.throughput.tokens_per_second < alone.throughput.tokens_per_second
    assert as_json(beside)["flops_per_token"]["teacher"]["forward"] == pytest.approx(forward)
    change(run, teacher_top_k=32)
    assert flops.teacher_flops_per_token(run_config.load_run(run.path)) == 0
