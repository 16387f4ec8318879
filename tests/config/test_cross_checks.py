"""Checks of train.json against model.json, and that every command reports them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rungs.config.run_config import conflicts
from tests.support.commands import run_script
from tests.support.configs import model_config, train_config
from tests.support.tiny_run import make_run

MUP = {"mup": {"base_emb_dim": 8}}
EXPERTS = {"n_experts": 2, "experts_per_token": 1}


def lora(*targets: str) -> dict[str, Any]:
    adapted = {"rank": 2, "alpha": 4.0, "targets": list(targets)}
    return {"start_from": "imported", "lora": adapted}


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {"sequence_length": 8}),
        ({}, {"sequence_length": 6, "sharding": {"mode": "cp", "context": 2}}),
        ({}, {"sequence_length": 7, "sharding": {"mode": "cp"}}),  # unknown before the start
        (MUP, {"optimizer": "adamw"}),
        (MUP, {"optimizer": "muon"}),
        ({}, {"optimizer": "sgd"}),
        ({}, lora("query", "key", "value", "output", "up", "down")),
        ({"feed_forward": "swiglu"}, lora("gate")),
        (EXPERTS, lora("output")),
        ({"bidirectional": True}, {"objective": "masked_diffusion", "target_offset": 0}),
        ({"prediction_module": True}, {"objective": "multi_token", "seed": 1}),
    ],
)
def test_valid_pairs_have_no_problems(model: dict[str, Any], train: dict[str, Any]) -> None:
    assert list(conflicts(model_config(**model), train_config(**train))) == []


@pytest.mark.parametrize(
    ("model", "train", "lines"),
    [
        ({}, {"sequence_length": 9}, ["sequence_length: 9 is longer than .*; at most 8"]),
        (
            {},
            {"sharding": {"mode": "cp", "context": 3}},
            ["sequence_length: 8 is not divisible by the 3 devices of sharding.context; use 6"],
        ),
        (MUP, {"optimizer": "sgd"}, ['optimizer: "sgd" .* mup .*; use "adamw" or "muon"']),
        (MUP, {"optimizer": "lion"}, ['optimizer: "lion" is not supported with mup']),
        (MUP, {"optimizer": "adafactor"}, ['optimizer: "adafactor" is not supported with mup']),
        (MUP, lora("query"), ["lora: not supported with mup"]),
        ({}, lora("up", "gate"), ['lora.targets: gate: feed_forward "gelu_tanh" has none']),
        ({"feed_forward": "none"}, lora("up"), ['lora.targets: up: feed_forward "none"']),
        (EXPERTS, lora("key", "down"), ["lora.targets: down: .* mixture of experts"]),
        ({"n_layers": 0}, lora("key"), ["lora.targets: key: the model has no layers"]),
        (
            {"bidirectional": True},
            {},
            ['objective: "masked_diffusion" and bidirectional .* need'],
        ),
        (
            {"bidirectional": True},
            {"objective": "masked_diffusion", "sample_prompts": ["def"]},
            ["target_offset: must be 0", "sample_prompts and benchmarks: not supported"],
        ),
        (
            {},
            {"objective": "multi_token"},
            ['objective: "multi_token" and prediction_module .* need'],
        ),
        (
            {"prediction_module": True},
            {"objective": "multi_token", "target_offset": 0},
            ["target_offset: must be 1"],
        ),
        (
            {"tied_embeddings": True},
            {"learning_rate_multipliers": {"head": 2.0, "vectors": 2.0}},
            ["learning_rate_multipliers.head: with tied_embeddings the head is the embedding"],
        ),
        (
            {},
            {"learning_rate_multipliers": {"residual_scale": 2.0}},
            ["learning_rate_multipliers.residual_scale: model.json has no residual_scalars"],
        ),
        (
            {"tied_embeddings": True},
            {
                "optimizer": "muon",
                "group_schedules": {"head": "linear", "vectors": "linear"},
                "group_beta2": {"matrices": 0.9, "embedding_skip": 0.9},
            },
            [
                "group_schedules.head: with tied_embeddings the head is the embedding",
                "group_beta2.matrices: muon has no beta2 for kernels",
                "group_beta2.embedding_skip: model.json has no residual_scalars",
            ],
        ),
        (
            MUP,
            {"sequence_length": 9, "optimizer": "sgd", **lora("gate")},
            ["sequence_length: 9", 'optimizer: "sgd"', "lora: not", "lora.targets: gate"],
        ),
    ],
)
def test_each_problem_is_one_line(
    model: dict[str, Any], train: dict[str, Any], lines: list[str]
) -> None:
    found = list(conflicts(model_config(**model), train_config(**train)))
    assert len(found) == len(lines)
    for line, pattern in zip(found, lines, strict=True):
        assert re.match(pattern, line), line


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", "RUN"),
        ("train.py", "NEW", "--like", "RUN"),
        ("plan.py", "RUN", "--device", "h100"),
        ("mup.py", "check", "RUN"),
    ],
    ids=" ".join,
)
def test_every_command_reports_problems_and_changes_nothing(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", optimizer="sgd").path
    model = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(model | MUP))
    before = sorted(tmp_path.rglob("*"))
    folders = {"RUN": str(run), "NEW": str(tmp_path / "new")}
    script, *options = (folders.get(part, part) for part in command)
    options += ["--datasets-dir", str(tmp_path / "none")]
    done = run_script(script, *options)
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = done.stderr.splitlines()
    assert error.startswith(f'error: {run / "train.json"}: optimizer: "sgd" is not supported')
    assert sorted(tmp_path.rglob("*")) == before
