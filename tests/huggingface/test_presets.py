"""Presets: their sizes, the runs made from them, and the table in the documentation."""

from rungs.common.command import run_command

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rungs.cli import plan, train
from rungs.common.errors import UserError
from rungs.common.shown_text import format_bytes
from rungs.config import run_config
from rungs.huggingface.config_keys import HFConfig
from rungs.huggingface.families import FAMILIES, family_of
from rungs.huggingface.families.family import normal_form
from rungs.huggingface.presets import create_preset, preset_model, preset_names
from rungs.planning.flops import count_parameters
from rungs.step.state import shapes_of
from tests.support.committed_runs import ROOT
from tests.support.long import long_except
from tests.support.published_configs import PUBLISHED
from tests.support.published_sizes import PUBLISHED_SIZES

CONTENT = json.loads((ROOT / "rungs/huggingface/presets.json").read_text())["models"]
PLANNED = ["gpt2", "gemma-3-1b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3.5-0.8b"]
"""Presets that differ in what their plans count."""


def test_presets_have_as_many_parameters_as_the_published_models() -> None:
    models = {name: preset_model(name) for name in preset_names()}
    found = {name: count_parameters(shapes_of(model)).total for name, model in models.items()}
    assert found == PUBLISHED_SIZES


WITHOUT = {"qwen2"}


def test_every_other_family_has_a_preset() -> None:
    types = {each["config"]["model_type"] for each in CONTENT.values()}
    assert types == set(FAMILIES) - WITHOUT


WHOLE = {name.replace("-it", "-pt"): config for name, (config, _) in PUBLISHED.items()}
"""Published configs with all of their keys, by hub id."""


@pytest.mark.parametrize("name", [n for n in preset_names() if CONTENT[n]["source"] in WHOLE])
def test_a_preset_is_what_the_published_config_says(name: str) -> None:
    hf_config = HFConfig(Path("config.json"), WHOLE[CONTENT[name]["source"]])
    whole = family_of(hf_config).to_model_config(hf_config)
    assert run_config.differences(normal_form(preset_model(name)), normal_form(whole)) == {}


def made(place: Path, preset: str, *settings: str) -> run_config.RunConfig:
    with create_preset(str(place), preset, settings) as folder:
        return run_config.load_run(folder)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_valid_run(name: str, tmp_path: Path) -> None:
    config = made(tmp_path / "run", name)
    assert config.model == preset_model(name)
    assert run_config.unused_keys(config) == []
    assert config.sequence_length == 1024
    assert 5e-5 < config.train.learning_rate < 1e-3
    assert config.train.lineage is not None
    assert config.train.lineage.like == name


def test_keys_of_a_preset_can_be_changed_and_the_same_command_takes_the_same_run(
    tmp_path: Path,
) -> None:
    settings = ("n_layers=2", "learning_rate=0.01", "dataset=mine")
    config = made(tmp_path / "run", "gpt2", *settings)
    assert (config.model.n_layers, config.model.n_heads) == (2, 12)
    assert (config.train.learning_rate, config.train.dataset) == (0.01, "mine")
    assert made(tmp_path / "run", "gpt2", *settings) == config
    with pytest.raises(UserError, match="already exists with other keys than this copy of gpt2"):
        made(tmp_path / "run", "gpt2", "n_layers=3")
    with pytest.raises(UserError, match=r"did you mean learning_rate\?"):
        made(tmp_path / "other", "gpt2", "learning_rat=3")
    assert not (tmp_path / "other").exists()


def test_runs_in_the_checkout_name_their_schemas() -> None:
    with create_preset(str(ROOT / "runs/never-kept"), "gpt2", (), keep=False) as folder:
        content = json.loads((folder / "train.json").read_text())
    assert content["$schema"] == "../../schemas/train.schema.json"
    assert not folder.exists()


def command(script: Any, *arguments: object) -> Result:
    return CliRunner().invoke(script.main, list(map(str, arguments)))


@pytest.mark.parametrize("script", [train, plan])
def test_an_unknown_preset_is_one_line_with_a_suggestion(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{script.__name__}.py", str(tmp_path / "run"), "--preset", "gpt2-mdium"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        run_command(script.main)
    assert ended.value.code == 2
    expected = "error: --preset: no preset is called 'gpt2-mdium'; did you mean gpt2-medium?\n"
    assert capsys.readouterr().err == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (train, ("--preset", "gpt2", "--like", "runs/layers"), "give one of them, not both"),
        (train, ("--set", "seed=1"), "--set: needs an option that makes a run"),
        (train, ("--preset", "gpt2", "--replay", "step-000001"), "--replay: runs a recorded"),
        (plan, ("--set", "seed=1"), "--set: needs --preset"),
    ],
)
def test_options_that_do_not_go_with_a_preset(
    script: Any, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = command(script, tmp_path / "run", *options)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


DEVICE = "tpu-v5p"
ROW = re.compile(
    r"^\| \[`(?P<preset>[^`]+)`\]\((?P<link>\S+)\) \| (?P<parameters>[\d,]+)"
    r" \| (?P<devices>\d+) \| (?P<planned>[^|]+) \|(?P<compiled>[^|]+)\|$",
    re.MULTILINE,
)
ROWS = {row["preset"]: row for row in ROW.finditer((ROOT / "docs/models.md").read_text())}
"""The documentation's table: on how many devices each preset's step fits, with its memory on
each."""


def test_the_documentation_lists_every_preset() -> None:
    found = [(name, row["link"], row["parameters"]) for name, row in ROWS.items()]
    assert found == [
        (name, f"https://huggingface.co/{CONTENT[name]['source']}", f"{PUBLISHED_SIZES[name]:,}")
        for name in preset_names()
    ]


def planned(
    name: str, devices: int, place: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> dict[str, Any]:
    """Plan a preset on this many devices, with a sequence on each or eight in all."""
    for variable in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(variable, "")
    keys = f"microbatch_size={max(8, devices)}", "compute_dtype=bfloat16"
    changes = [word for key in keys for word in ("--set", key)]
    mesh = ("--device", DEVICE, "--sharding", f"fsdp:{devices}", "--datasets-dir", place)
    run = (place / "run", "--preset", name, "--json")
    result = command(plan, *run, *changes, *mesh, *options)
    assert result.exit_code in (0, 1), result.output
    assert list(place.iterdir()) == []
    found: dict[str, Any] = json.loads(result.output)
    return found


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize("name", long_except({"gpt2"}, PLANNED))
def test_a_preset_is_planned_on_the_fewest_devices_that_hold_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[name]
    found = planned(name, int(row["devices"]), tmp_path, monkeypatch)
    assert found["parameters"]["total"] == PUBLISHED_SIZES[name]
    assert format_bytes(found["bytes_per_device"]["total"]) == f"{row['planned']} GB", (
        "correct the table"
    )
    assert holds(found)
    assert row["devices"] == "1" or not holds(
        planned(name, int(row["devices"]) // 2, tmp_path, monkeypatch)
    )


def holds(plan: dict[str, Any]) -> bool:
    """Whether the step fits even if it needs as much more as the plan may be wrong."""
    most = plan["bytes_per_device"]["total"] * (1 + plan["memory_error"])
    return most <= plan["usable_bytes_per_device"]
