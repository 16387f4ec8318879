"""Options of `generate.py` and keys of `train.json` that meet in the same code: every pair of their
values, from the command or the start of a run to its end, with a model that has layers."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from rungs.checkpointing.load import load_model
from rungs.config import run_config
from rungs.config.optimization_config import BUILT_IN_OPTIMIZERS
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.commands import run_script
from tests.support.covering import Row, covering_rows, name_of
from tests.support.layered_model import BYTES, write_model
from tests.support.tiny_run import MODEL, TRAIN, last_checkpoint

GENERATE: dict[str, list[Any]] = {
    "dtype": ["float32", "bfloat16"],
    "weights": [None, "int8"],
    "chat": [False, True],
    "lookahead": [0, 3],
    "texts": [1, 3],
    "temperature": [0, 1],
}
GENERATE_ROWS = covering_rows(GENERATE)
PROMPTS = ("one two one two", "a", "The quick brown fox jumps over")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SHARDINGS: dict[str, dict[str, Any]] = {
    "dp": {"mode": "dp"},
    "fsdp": {"mode": "fsdp"},
    "tp": {"mode": "tp"},
    "fsdp_tp": {"mode": "fsdp_tp", "data": 4, "tensor": 2},
    "cp": {"mode": "cp", "data": 2, "context": 4},
}
TRAINING: dict[str, list[Any]] = {
    "sharding": list(SHARDINGS),
    "optimizer": list(BUILT_IN_OPTIMIZERS),
    "documents": ["joined text", "separate text", "joined pairs", "separate pairs"],
    "remat": ["none", "activations", "dots", "full"],
    "lora": [False, True],
}


def has_kernels(row: Row) -> bool:
    """Whether the optimizer has something to train: muon is for kernels, and LoRA trains none."""
    return not (row["optimizer"] == "muon" and row["lora"])


TRAINING_ROWS = covering_rows(TRAINING, has_kernels)
LORA = {"rank": 4, "alpha": 8.0, "targets": ["query", "value", "output", "up", "down"]}
STEPS = 3
TRAINED = {"context_length": 16, "emb_dim": 32, "n_layers": 2, "n_heads": 8}


@pytest.mark.parametrize(
    ("factors", "rows"), [(GENERATE, GENERATE_ROWS), (TRAINING, TRAINING_ROWS)]
)
def test_rows_have_every_pair_of_values(factors: dict[str, list[Any]], rows: list[Row]) -> None:
    assert len(rows) < 30
    for one, values in factors.items():
        for other in factors.keys() - {one}:
            pairs = {(a, b) for a in values for b in factors[other]}
            if {one, other} == {"optimizer", "lora"}:
                pairs -= {("muon", True), (True, "muon")}
            assert {(row[one], row[other]) for row in rows} == pairs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("generate") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def generated(model: Path, row: Row) -> str:
    """Return what generate.py prints."""
    options = ["--dtype", row["dtype"], "--new-tokens", 12, "--past-the-end"]
    options += ["--temperature", row["temperature"], "--lookahead", row["lookahead"]]
    options += ["--weights", row["weights"]] if row["weights"] else []
    options += ["--chat"] if row["chat"] else []
    done = run_script("generate.py", model, *PROMPTS[: row["texts"]], *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("row", GENERATE_ROWS, ids=name_of)
def test_options_of_generate_go_together(row: Row, model: Path) -> None:
    """In float32 a draft changes nothing; in other formats rounding may depend on how many tokens
    are computed at once."""
    text = generated(model, row)
    for prompt in PROMPTS[: row["texts"]]:
        assert f"> {prompt}\n" in text if row["chat"] else prompt in text
    assert len(text.strip()) > sum(map(len, PROMPTS[: row["texts"]]))
    if row["lookahead"] and row["dtype"] == "float32" and not row["weights"]:
        assert text == generated(model, row | {"lookahead": 0})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets of text and of pairs, and a model to start from."""
    place = tmp_path_factory.mktemp("train")
    lines = [f"{n} quick foxes jump over {n % 7} dogs.\n" for n in range(600)]
    (place / "text.txt").write_text("".join(lines))
    pairs = [{"prompt": f"{n % 9}:", "answer": "a" * (n % 5 + 1)} for n in range(400)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for kind, file in (("--text", "text.txt"), ("--pairs", "pairs.jsonl")):
        name = kind.removeprefix("--")
        options = ["--name", name, "--vocab-size", BYTES, "--datasets-dir", place / "datasets"]
        done = run_script("download_dataset.py", kind, place / file, *options)
        assert done.returncode == 0, done.stderr
    write_model(place / "start", **TRAINED)
    return place


def losses(place: Path, row: Row) -> list[float]:
    """Train a run; return the losses of its steps and of its validations."""
    documents, dataset = row["documents"].split()
    run = RunFolder(place / name_of(row))
    if not run.path.exists():
        run.path.mkdir()
        keys = {
            "dataset": dataset,
            "documents": documents,
            "sharding": SHARDINGS[row["sharding"]],
            "microbatch_size": 8,
            "min_train_tokens": STEPS * 2 * 8 * 16,
            "checkpoint_interval": 2,
            **{key: row[key] for key in ("optimizer", "remat")},
        }
        if row["lora"]:
            keys |= {"lora": LORA, "start_from": str(place / "start")}
        model = MODEL | TRAINED | {"vocab_size": BYTES}
        (run.path / "model.json").write_text(json.dumps(model))
        (run.path / "train.json").write_text(json.dumps(TRAIN | {"drop_rate": 0.0} | keys))
        kind = on_datasets(place / "datasets")
        code = launch(run, run_config.load_run(run.path), StartOptions(), kind)
        assert code == 0
    steps = metrics.read(run.metrics)
    assert len(steps) == STEPS
    found = [loss for step in steps for loss in (step.train_loss, step.validation_loss)]
    return [loss for loss in found if loss is not None]


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("row", TRAINING_ROWS, ids=name_of)
def test_keys_of_training_go_together(row: Row, place: Path) -> None:
    found = losses(place, row)
    run = RunFolder(place / name_of(row))
    assert last_checkpoint(run).damage() == []
    logits_BSV = load_model(run.path)(jnp.ones((1, 4), jnp.int32))
    assert jnp.isfinite(logits_BSV).all()
    expected = losses(place, row | {"sharding": "dp", "remat": "none"})
    assert len(found) >= STEPS + 1
    assert found == pytest.approx(expected, rel=1e-3)
