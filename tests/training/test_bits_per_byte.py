"""Bits per byte, recorded at each validation."""

import json
import math
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rungs.config import run_config
from rungs.data.text.tokenizer import train_bpe
from rungs.run import metrics
from rungs.run.folder import StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.tiny_run import MODEL, make_dataset, make_run

pytestmark = pytest.mark.usefixtures("no_charts")


def test_it_is_the_loss_over_the_bytes_of_the_targets(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    tokenizer = train_bpe(["a text of the test"], 300)
    tokenizer.save(tmp_path / "tiny" / "tokenizer.json")
    plain = {"gradient_accumulation_steps": 1, "drop_rate": 0.0, "min_train_tokens": 64}
    run = make_run(tmp_path / "run", **plain)
    (run.path / "model.json").write_text(json.dumps(MODEL | {"vocab_size": 300}))
    assert launch(run, run_config.load_run(run.path), StartOptions(), on_datasets(tmp_path)) == 0
    [step] = metrics.read(run.metrics)
    tokens = load_file(tmp_path / "tiny" / "validation.safetensors")["tokens"][1:257]
    text_bytes = tokenizer.byte_count(tokens)
    assert step.validation_loss is not None
    expected = step.validation_loss * 256 / (math.log(2) * text_bytes)
    assert step.bits_per_byte == pytest.approx(expected, rel=1e-12)
