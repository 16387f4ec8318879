"""Keys that a file sets although they have no effect."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from rungs.checkpointing.load import Start
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import BUILT_IN_OPTIMIZERS, Schedule
from rungs.config.run_config import _KEYS_OF_LAYERS, RunConfig, unused_keys
from rungs.config.train_config import TrainConfig
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.start import with_device_choices
from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS
from tests.support.tiny_reinforcement import make_reinforcement_run
from tests.support.tiny_run import MODEL, make_run

SLIDING = {"sliding_window": 4, "sliding_rope_theta": 1e4, "positions": "rope"}


def unused(folder: Path, model: dict[str, Any], train: dict[str, Any]) -> list[str]:
    run = make_run(folder / "run", **train)
    (run.path / "model.json").write_text(json.dumps(MODEL | model))
    return unused_keys(run_config.load_run(run.path))


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ({"momentum": 0.95}, 'momentum: has no effect with optimizer "adamw"'),
        ({"beta1": 0.9, "optimizer": "sgd"}, 'beta1: has no effect with optimizer "sgd"'),
        ({"beta2": 0.9, "optimizer": "adafactor"}, 'beta2: has no effect with optimizer "adaf'),
        ({"orthogonalization": "polar_express"}, "orthogonalization: has no effect with opti"),
        ({"normuon_beta2": 0.9}, 'normuon_beta2: has no effect with optimizer "adamw"'),
        ({"cautious_weight_decay": True, "weight_decay": 0}, "cautious_weight_decay: has no effec"),
        ({"epsilon": 1e-8, "optimizer": "lion"}, 'epsilon: has no effect with optimizer "lion"'),
        ({"decay_period_percent": 10}, 'decay_period_percent: has no effect with schedule "cos'),
        ({"min_learning_rate_percent": 1.0, "schedule": "constant"}, "min_learning_rate_percent:"),
        ({"start_learning_rate_percent": 1.0, "warmup_period_percent": 0}, "start_learning_rate_p"),
        ({"decayed_parameters": "all", "weight_decay": 0.0}, "decayed_parameters: has no effect w"),
        ({"load_balancing_weight": 0.1}, "load_balancing_weight: has no effect without n_experts"),
        ({"seed": 3, "start_from": "imported", "drop_rate": 0.0}, "seed: has no effect with start"),
    ],
)
def test_a_key_of_train_json_without_effect_is_named(
    train: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (found,) = unused(tmp_path, {}, train)
    assert found.startswith(f"train.json: {line}")


@pytest.mark.parametrize(
    ("model", "train", "line"),
    [
        ({"rope_theta": 1e5}, {}, 'rope_theta: has no effect with positions "learned"'),
        ({"norm": "none", "norm_epsilon": 1e-6}, {}, 'norm_epsilon: has no effect with norm "none'),
        ({"norm": "none", "norm_placement": "around"}, {}, "norm_placement: has no effect with no"),
        ({"feed_forward": "none", "ffn_bias": True}, {}, "ffn_bias: has no effect with feed_forwa"),
        ({"sliding_window": 4, "layer_pattern": ["global"]}, {}, "sliding_window: has no effect,"),
        (SLIDING | {"rope_theta": 1e5}, {}, "rope_theta: has no effect, as every layer has slidin"),
        ({"init": "gpt2"}, {"start_from": "imported"}, "init: has no effect with start_from"),
        ({"zero_init_residual": True}, {"start_from": "imported"}, "zero_init_residual: has no ef"),
        ({"norm": "none", "norm_parameters": True}, {}, "norm_parameters: has no effect with norm"),
        ({"qk_norm_scope": "head"}, {}, "qk_norm_scope: has no effect without qk_norm"),
        ({"normalize_expert_weights": False}, {}, "normalize_expert_weights: has no effect withou"),
    ],
)
def test_a_key_of_model_json_without_effect_is_named(
    model: dict[str, Any], train: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (found,) = unused(tmp_path, model, train)
    assert found.startswith(f"model.json: {line}")


def test_without_layers_the_keys_of_layers_have_no_effect(tmp_path: Path) -> None:
    model: dict[str, Any] = {
        "n_layers": 0,
        "n_heads": 2,
        "qkv_bias": True,
        "attention_soft_cap": 5.0,
    }
    model |= {"positions": "rope", "ffn_dim": 8, "residual": False}
    found = unused(tmp_path, model, {"remat": "full", "scan_unroll": 2})
    keys = {line.split(": ")[1] for line in found}
    assert keys == {*(model.keys() - {"n_layers"}), "remat", "scan_unroll"}
    assert all(line.endswith("has no effect with n_layers 0; remove it") for line in found)


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {}),
        ({"sliding_window": None, "ffn_dim": None}, {"clipping_max_norm": None}),
        ({}, {"optimizer": "muon", "momentum": 0.9, "beta1": 0.9, "beta2": 0.9, "epsilon": 1e-8}),
        ({}, {"schedule": "warmup_stable_decay", "decay_period_percent": 10}),
        ({"n_experts": 2, "experts_per_token": 1}, {"load_balancing_weight": 0.1}),
        (SLIDING | {"layer_pattern": ["sliding", "global"], "rope_theta": 1e5}, {}),
        ({}, {"seed": 3, "start_from": "imported", "drop_rate": 0.1}),
    ],
)
def test_keys_with_effect_and_defaults_are_not_named(
    model: dict[str, Any], train: dict[str, Any], tmp_path: Path
) -> None:
    assert unused(tmp_path, model, train) == []


def test_without_a_validation_split_its_keys_have_no_effect(tmp_path: Path) -> None:
    config = run_config.load_run(make_run(tmp_path / "run", validation_tokens=256).path)
    (line,) = unused_keys(config, has_validation=False)
    assert line.startswith("train.json: validation_tokens: has no effect without a validation")


def test_the_keys_of_layers_are_keys() -> None:
    assert set(_KEYS_OF_LAYERS) < ModelConfig.model_fields.keys()


@pytest.mark.parametrize("run", [*COMMITTED_RUNS, *REINFORCEMENT_RUNS], ids=lambda run: run.name)
def test_a_first_start_of_a_committed_run_warns_of_no_key(run: Path) -> None:
    start = Start(RunFolder(run), run_config.load_any_run(run), StartOptions(), None, None)
    assert unused_keys(start.config) == []
    assert unused_keys(with_device_choices(start).config) == []


@pytest.mark.parametrize(
    "model",
    [
        {"n_layers": 0, "positions": "none", "n_heads": None},
        {"norm": "none", "feed_forward": "none"},
        {"positions": "rope"},
        {"n_experts": None},
    ],
)
@pytest.mark.parametrize(
    "train",
    [
        *({"optimizer": name} for name in BUILT_IN_OPTIMIZERS),
        *({"schedule": name} for name in get_args(Schedule)),
        {"weight_decay": 0.0, "warmup_period_percent": 0.0},
        {"start_from": "imported"},
    ],
)
def test_keys_that_a_file_leaves_out_are_not_named(
    model: dict[str, Any], train: dict[str, Any]
) -> None:
    required: dict[str, Any] = {"dataset": "tiny", "microbatch_size": 4, "learning_rate": 0.01}
    required |= {"checkpoint_interval": 5, "min_train_tokens": 1024}
    keys = {key: value for key, value in (MODEL | model).items() if value is not None}
    config = RunConfig(ModelConfig(**keys), TrainConfig(**(required | train)))
    start = Start(RunFolder(Path("run")), config, StartOptions(), None, None)
    chosen = with_device_choices(start).config
    assert chosen.train.remat != "auto"
    assert unused_keys(chosen, has_validation=False) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"updates_per_rollout": 2, "loss": "grpo"}, []),
        (
            {"updates_per_rollout": 2, "loss": "cispo"},
            ['clip_low: has no effect with loss "cispo"'],
        ),
        (
            {"updates_per_rollout": 1, "clip_high": 0.3},
            [
                f"{key}: has no effect with updates_per_rollout 1 and staleness 0"
                for key in ("clip_low", "clip_high")
            ],
        ),
    ],
)
def test_clipping_ranges_that_no_update_uses(
    keys: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    run = make_reinforcement_run(tmp_path / "run", tmp_path, clip_low=0.1, **keys)
    config = run_config.load_reinforcement_run(run.path)
    assert unused_keys(config) == [f"reinforce.json: {line}; remove it" for line in expected]
