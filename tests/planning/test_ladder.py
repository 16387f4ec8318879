"""Ladders: sizes by hand, scaling laws against published models, folders that load and plan."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rungs.cli import plan
from rungs.cli.plan import parse_sharding
from rungs.common.errors import UserError
from rungs.config import run_config as run_config_module
from rungs.config.run_config import RunConfig
from rungs.data.tokens.dataset import Dataset
from rungs.planning import forecast, hardware
from rungs.planning.ladder import Rung, batch_tokens, learning_rate, propose
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.configs import model_config, train_config
from tests.support.tiny_run import make_dataset, make_run

pytestmark = pytest.mark.usefixtures("shared_traces")

LLAMA: dict[str, Any] = {
    "vocab_size": 500,
    "context_length": 64,
    "emb_dim": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 88,
    "positions": "rope",
    "norm": "rms_norm",
    "feed_forward": "swiglu",
    "attention_output_bias": False,
    "ffn_bias": False,
}
PUBLISHED = [(6 * 7e9 * 2e12, 2304 * 4096, 4.2e-4), (6 * 67e9 * 2e12, 4608 * 4096, 3.2e-4)]
"""FLOPs, batch in tokens and learning rate of DeepSeek LLM 7B and 67B (Bi et al. 2024, table 2)."""


def run_config(model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig(model_config(**{**LLAMA, **(model or {})}), train_config(**train))


def by_hand(rung: Rung) -> tuple[int, float]:
    """Return parameters and FLOPs per token of a Llama with untied embeddings."""
    keys = rung.size.changes
    width, layers, hidden = keys["emb_dim"], keys["n_layers"], keys["ffn_dim"]
    attention = width * width * 2 + width * keys["n_kv_heads"] * 8 * 2
    of_layers = layers * (attention + 3 * width * hidden + 2 * width) + width
    embedding = LLAMA["vocab_size"] * width
    flops = 6 * (of_layers + embedding) + 12 * layers * width * 64
    return of_layers + 2 * embedding, flops


def test_a_rung_spends_its_budget_on_twenty_tokens_per_parameter() -> None:
    budget = 3e16
    rungs = propose(run_config(), budget, 3, {})
    assert [rung.budget for rung in rungs] == pytest.approx([budget / 10, budget / 10**0.5, budget])
    for rung in rungs:
        parameters, flops = by_hand(rung)
        assert rung.size.parameters == parameters
        assert rung.size.flops_per_token == pytest.approx(flops, rel=1e-3)
        assert rung.flops == pytest.approx(rung.budget, rel=0.02)
        assert rung.tokens / parameters == pytest.approx(20, rel=0.3)
        keys = rung.size.changes
        assert keys["n_layers"] == 1 or 25 < keys["emb_dim"] / keys["n_layers"] < 110
        assert keys["head_dim"] == 8
        assert keys["n_heads"] == 2 * keys["n_kv_heads"] == keys["emb_dim"] / 8


def test_only_active_experts_count() -> None:
    experts = {"n_experts": 8, "experts_per_token": 2}
    sparse = propose(run_config(experts), 1e15, 1, {})[0]
    assert sparse.tokens / sparse.size.parameters == pytest.approx(20, rel=0.3)
    model = {**LLAMA, **experts, **sparse.size.changes}
    all_parameters = propose(run_config(), 1e15, 1, {})[0].size.parameters
    assert sparse.size.parameters == pytest.approx(all_parameters, rel=0.5)
    assert model["n_experts"] * model["n_layers"] * 3 * model["emb_dim"] * model["ffn_dim"] > (
        2 * sparse.size.parameters
    )


@pytest.mark.parametrize(("flops", "batch", "rate"), PUBLISHED)
def test_the_laws_match_published_models(flops: float, batch: int, rate: float) -> None:
    assert learning_rate(flops) == pytest.approx(rate, rel=0.03)
    assert batch_tokens(flops) == pytest.approx(batch, rel=0.05)


def test_a_rung_has_the_batch_of_the_law_from_its_first_step_on() -> None:
    (rung,) = propose(run_config(batch_growth={"5": 2}), 1e13, 1, {})
    assert rung.changes["batch_growth"] == rung.config.train.batch_growth == {}
    assert rung.config.tokens_before(rung.steps) == rung.tokens


def test_with_mup_the_learning_rate_stays() -> None:
    rung = propose(run_config({"mup": {"base_emb_dim": 32}}), 1e13, 1, {})[0]
    assert "learning_rate" not in rung.changes


@pytest.mark.parametrize(
    ("model", "train", "line"),
    [
        ({"n_layers": 0}, {}, "the model has no layers"),
        ({}, {"start_from": "imported"}, "start_from fixes the model's size"),
        ({}, {"optimizer": "sgd"}, "known for adamw and muon, not sgd"),
    ],
)
def test_a_run_that_cannot_be_scaled_is_rejected(
    model: dict[str, Any], train: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=f"--ladder: .*{line}"):
        propose(run_config(model, **train), 1e15, 1, {})


def test_a_budget_that_is_too_small_names_one_that_is_enough() -> None:
    with pytest.raises(UserError, match=r"first rung's 1e\+09 FLOPs are too few") as error:
        propose(run_config(), 1e10, 3, {})
    enough = float(str(error.value).partition("; give ")[2].split()[0])
    assert len(propose(run_config(), enough, 3, {})) == 3
    with pytest.raises(UserError):
        propose(run_config(), enough * 0.9, 3, {})


def test_short_datasets_are_repeated(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    datasets = {"tiny": Dataset("tiny", tmp_path / "tiny")}
    tiny = {"vocab_size": 64, "context_length": 16}
    rung = propose(run_config(tiny, dataset="tiny"), 3e12, 1, datasets)[0]
    epoch_tokens = 20_000 // rung.tokens_per_step * rung.tokens_per_step
    assert rung.changes["epochs"] == math.ceil(rung.size.tokens(3e12) / epoch_tokens)
    assert rung.changes["min_train_tokens"] <= 20_000
    assert rung.tokens == rung.changes["min_train_tokens"] * rung.changes["epochs"]
    assert rung.flops == pytest.approx(3e12, rel=0.05)


def ladder(run: RunFolder, *options: object) -> Any:
    return CliRunner().invoke(
        plan.main, [str(run.path), "--ladder", "1e12", "--rungs", "2", *map(str, options)]
    )


@pytest.mark.long
def test_folders_are_runs_with_these_figures(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run")
    options: tuple[Any, ...] = ("--into", tmp_path / "ladder", "--json")
    options += ("--datasets-dir", tmp_path / "datasets")
    options += ("--device", "h100", "--sharding", "dp:1")
    done = ladder(run, *options)
    assert done.exit_code == 0, done.output
    folders = sorted((tmp_path / "ladder").iterdir())
    assert done.stderr.split() == [str(folder) for folder in folders]
    content = json.loads(done.stdout)
    assert content["fits"] is True
    assert content["missing_datasets"] == []
    for folder, rung in zip(folders, content["rungs"], strict=True):
        read = run_config_module.load_run(folder)
        assert read.train.lineage is not None
        assert read.train.lineage.set == rung["set"]
        sharding = parse_sharding("dp:1")
        planned = forecast.forecast(
            RunFolder(folder),
            read,
            hardware.device_by_name("h100"),
            sharding,
            tmp_path / "datasets",
            0.4,
        )
        assert planned.tokens.steps == rung["steps"]
        assert planned.tokens.planned == rung["tokens"]
        assert planned.active.total == rung["parameters"]
        assert planned.model_flops_per_token * rung["tokens"] == pytest.approx(rung["flops"])
        assert planned.seconds_left is not None
    assert planned.memory.total == content["bytes_per_device_of_largest"]
    assert ladder(run, *options).exit_code == 0
    other = ladder(run, *options, "--ladder", "2e12")
    assert isinstance(other.exception, UserError)
    assert "already exists with other keys" in str(other.exception)


def test_if_one_folder_is_taken_none_is_made(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_run(tmp_path / "ladder" / "rung-2")
    done = ladder(run, "--datasets-dir", tmp_path, "--into", tmp_path / "ladder")
    assert isinstance(done.exception, UserError)
    assert [path.name for path in (tmp_path / "ladder").iterdir()] == ["rung-2"]


@pytest.mark.long
def test_the_table_has_times_if_the_speed_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    without = ladder(run, "--datasets-dir", tmp_path).stdout
    assert "time" not in without.splitlines()[0]
    assert "give it as --tokens-per-second" in without
    assert "tiny is not here, so the number of epochs is not known" in without
    timed = ladder(run, "--datasets-dir", tmp_path, "--device", "mine:1e10:1e9:1e12").stdout
    assert timed.splitlines()[0].endswith("learning rate        time")
    assert timed.splitlines()[2].endswith("4 min 10 s")  # 1e12 at 40% of 1e10 per second
    slow_memory = ladder(run, "--datasets-dir", tmp_path, "--device", "mine:1e10:1e9:1").stdout
    assert slow_memory == timed  # memory bandwidth limits the origin run, not the rungs


def test_a_ladder_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    place = ("--datasets-dir", tmp_path, "--into", tmp_path / "ladder")
    done = ladder(run, *place, "--device", "mine:1e10:1e5:1e12")
    assert done.exit_code == 1
    assert "it does not fit, and nothing is written" in done.stdout
    assert not (tmp_path / "ladder").exists()


def test_a_batch_larger_than_the_dataset_is_reported(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    datasets = {"tiny": Dataset("tiny", tmp_path / "tiny")}
    tiny = {"vocab_size": 64, "context_length": 16}
    with pytest.raises(UserError, match=r"--ladder: a batch of .* is more than the dataset has"):
        propose(run_config(tiny, dataset="tiny", microbatch_size=2048), 1e12, 1, datasets)


def test_head_dim_stays_even_for_rotary_positions() -> None:
    wider_heads = {"mup": {"base_emb_dim": 32, "base_head_dim": 8}, "emb_dim": 32, "head_dim": 8}
    rung = propose(run_config({**wider_heads, "ffn_dim": None}), 1e12, 1, {})[0]
    assert rung.size.changes["head_dim"] % 2 == 0


@pytest.mark.parametrize(
    ("options", "message"), [(["--ladder", "nan"], "nan"), (["--rungs", "2"], "need --ladder")]
)
def test_wrong_options_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = CliRunner().invoke(plan.main, [str(run.path), *options])
    assert done.exit_code
    assert message in f"{done.output} {done.exception}"


def test_a_committed_run_has_a_ladder() -> None:
    found = run_config_module.load_run(ROOT / "runs/llama")
    rungs = propose(found, 1e16, 3, {})
    assert len({rung.size.parameters for rung in rungs}) == 3
