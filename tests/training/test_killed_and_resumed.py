"""Runs of every kind are killed, resumed, and end as if nothing had happened, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from rungs.config.run_config import load_run
from rungs.objectives.distillation import store_predictions
from rungs.objectives.table import objective_of
from rungs.parallel.sharding import one_device
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.sharded_models import DEEPSEEK
from tests.support.starting import Killed, die_before
from tests.support.tiny_run import (
    assert_same_outcome,
    change_model,
    final_arrays,
    make_dataset,
    make_documents,
    make_preferences,
    make_run,
    make_unpaired,
    write_start,
)
from tests.training.test_own_objective import load_example

START = "the folder of weights to start from"
SHORT: dict[str, Any] = {
    "min_train_tokens": 8 * 128,
    "checkpoint_interval": 3,
    "decay_period_percent": 50,
    "sharding": {"devices": 1},
}
PREFERENCES = {"dataset": "prefs", "shuffle": True, "min_train_tokens": -1, "start_from": START}
DISTILLED = {"objective": "distill", "teacher": START, "hard_target_weight": 0.5}
LORA = {"rank": 3, "alpha": 12.0, "targets": ["query", "output", "up", "down"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "muon, averaged, in fsdp": (
        {"optimizer": "muon", "schedule": "linear", "ema_decay": 0.9, "microbatch_size": 8}
        | {"gradient_accumulation_steps": 1, "sharding": {"mode": "fsdp", "devices": 2}},
        {},
    ),
    "adamw in float8": ({"compute_dtype": "bfloat16", "matmul_dtype": "float8"}, {}),
    "lion and lora": (
        {"optimizer": "lion", "schedule": "warmup_stable_decay", "start_from": START, "lora": LORA},
        {},
    ),
    # wide enough that it factors the second moments of matrices
    "adafactor": ({"optimizer": "adafactor", "schedule": "constant"}, {"emb_dim": 128}),
    "experts balanced by biases": (
        {"balance_bias_rate": 0.05},
        {k: v for k, v in DEEPSEEK.items() if k != "head_dim"},
    ),
    "kto": (PREFERENCES | {"objective": "kto", "dataset": "unpaired"}, {}),
    "packed documents": (
        {"dataset": "documents", "documents": "separate", "packing": "best_fit", "epochs": 2}
        | {"shuffle": True, "min_train_tokens": 512},
        {},
    ),
    "a teacher's stored predictions": (DISTILLED | {"teacher_top_k": 7}, {"n_layers": 1}),
    "multi-token prediction with muon": (
        {"objective": "multi_token", "optimizer": "muon", "ema_decay": 0.9},
        {"prediction_module": True},
    ),
    "masked diffusion": (
        {"objective": "masked_diffusion", "target_offset": 0, "epochs": 2, "shuffle": True},
        {"vocab_size": 65, "bidirectional": True},
    ),
    "an objective of one's own": ({}, {}),
}
STATE = {"muon, averaged, in fsdp": "model.ema.", "adamw in float8": "float8.amaxes"}
STATE["experts balanced by biases"] = "blocks.feed_forward.router.balance_bias"
"""Part of the names of state that only these runs have."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets, and with weights to start from and to learn from."""
    place = tmp_path_factory.mktemp("place")
    make_dataset(place)
    make_documents(place)
    make_preferences(place)
    make_unpaired(place)
    write_start(place / "start")
    return place


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_resumes_bit_for_bit(
    case: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, model = CASES[case]
    keys = {k: str(place / "start") if v == START else v for k, v in (SHORT | train).items()}
    whole, killed = (make_run(tmp_path / name, **keys) for name in ("whole", "killed"))
    for run in (whole, killed):
        change_model(run, **model)
    if "teacher_top_k" in train:
        store_predictions(whole, load_run(whole.path), place, one_device)
    own = case == "an objective of one's own"
    kind = on_datasets(place, load_example(tmp_path).LabelSmoothing if own else objective_of)

    def go(run: RunFolder) -> int:
        return launch(run, load_run(run.path), StartOptions(), kind)

    assert go(whole) == 0
    with monkeypatch.context() as patch:
        die_before(5, patch)
        with pytest.raises(Killed):
            go(killed)
    assert go(killed) == 0
    assert_same_outcome(killed, whole)
    assert any(STATE.get(case, "") in name for name in final_arrays(whole))
