"""Runs that start from saved weights: full fine-tuning and LoRA."""

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.checkpointing.load import MergedWeights, Start, find_starting_weights, load_model
from rungs.checkpointing.weights_file import Origin, Weights, WeightsHeader, write_weights
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.data.text.tokenizer import train_bpe
from rungs.data.tokens.dataset import VALIDATION
from rungs.model.gpt import GPT
from rungs.model.lora import add_lora
from rungs.planning import report
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.state import named_arrays
from rungs.training.start import model_and_optimizer
from tests.cli.test_plan import planned
from tests.support.configs import ONE_FILE, mesh_of, model_config, train_config
from tests.support.starting import files, go, refusal
from tests.support.tiny_run import (
    MODEL,
    change_model,
    final_arrays,
    last_checkpoint,
    make_dataset,
    make_run,
    write_start,
)

LORA = {"rank": 3, "alpha": 12.0, "targets": ["query", "output", "up", "down"]}
ORIGIN = Origin(source="someone/small", model_type="gpt2", dtype="bfloat16")
CONFIG = ModelConfig.model_validate(MODEL)


@pytest.fixture(autouse=True)
def propagated() -> None:
    logger = logging.getLogger("rungs")
    logger.propagate = True


def imported_run(folder: Path, **train: Any) -> RunFolder:
    """Make a run with imported weights in bfloat16."""
    settings = {"start_from": "imported", "drop_rate": 0.0, "min_train_tokens": 12 * 128}
    run = make_run(folder, **{**settings, **train})
    write_start(run.imported, "gpt2", ORIGIN, "bfloat16", seed=11)
    return run


def first_loss(run: RunFolder) -> float:
    loss = metrics.read(run.metrics)[0].train_loss
    assert loss is not None
    return loss


def loss_on_first_batch(model: GPT, datasets_dir: Path) -> float:
    """Return the loss of the first 8 sequences, without the code that training uses."""
    from safetensors.numpy import load_file

    tokens = load_file(datasets_dir / "tiny" / "train.safetensors")["tokens"].astype(np.int32)
    rows = np.stack([tokens[i * 16 : i * 16 + 17] for i in range(8)])
    chances_of = nnx.jit(lambda model, tokens_BS: jax.nn.log_softmax(model(tokens_BS)))
    chances = np.asarray(chances_of(model, jnp.asarray(rows[:, :-1])), np.float64)
    return float(-np.take_along_axis(chances, rows[:, 1:, None], axis=-1).mean())


def test_training_starts_from_imported_weights(datasets_dir: Path, tmp_path: Path) -> None:
    run = imported_run(tmp_path / "run")
    imported = files(run.imported)
    expected = loss_on_first_batch(load_model(run.path), datasets_dir)
    assert go(run, datasets_dir) == 0
    assert first_loss(run) == pytest.approx(expected, rel=1e-5)
    steps = metrics.read(run.metrics)
    assert steps[-1].train_loss is not None
    assert steps[-1].train_loss < first_loss(run) - 0.3
    assert files(run.imported) == imported
    saved = Weights(last_checkpoint(run).folder / "model.safetensors")
    assert saved.header.origin == ORIGIN
    assert {saved.array(name).dtype.name for name in saved.names()} == {"float32"}


@pytest.fixture(scope="module")
def tuned(datasets_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with LoRA on imported weights, saved in shards."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    run = imported_run(folder, lora=LORA, max_weights_file_bytes=10_000)
    assert go(run, datasets_dir) == 0
    return run


def last_weights(run: RunFolder) -> Path:
    return last_checkpoint(run).folder / "model.safetensors"  # an index and shards, perhaps


@pytest.mark.long
def test_a_run_can_start_from_another_run(
    tuned: RunFolder, datasets_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rungs")
    run = make_run(tmp_path / "run", drop_rate=0.0, start_from=str(tuned.path))
    assert go(run, datasets_dir) == 0
    best = load_model(tuned.path)
    real = (tuned.checkpoints / "best").resolve().name
    assert f"({real}): 24 steps" in caplog.text
    assert first_loss(run) == pytest.approx(loss_on_first_batch(best, datasets_dir), rel=1e-4)


@pytest.mark.usefixtures("shared_traces")
def test_a_plan_counts_frozen_weights_in_the_dtype_of_their_file(tmp_path: Path) -> None:
    run = imported_run(tmp_path / "run", lora=LORA)
    config = run_config.load_run(run.path)
    start = Start(run, config, StartOptions(), None, find_starting_weights(run, config))
    model, _ = model_and_optimizer(start, 1, mesh_of(1))
    arrays = named_arrays(model).values()
    assert {array.dtype.name for array in arrays} == {"bfloat16", "float32"}
    found = planned(run, "mine:1e12:1e9:1e9")  # without padding
    padding = 2 * 2 * (128 - 64) * 32  # of embedding and head, to a multiple of 128
    assert found.memory.weights == sum(array.nbytes for array in arrays) + padding
    assert report.COUNTED_AS_FLOAT32 not in report.as_text(run, found)
    shutil.rmtree(run.imported)
    missing = planned(run, "mine:1e12:1e9:1e9")
    assert missing.memory.weights > 1.8 * found.memory.weights
    assert missing.disk.checkpoint_bytes == found.disk.checkpoint_bytes  # of the adapter
    assert report.COUNTED_AS_FLOAT32 in report.as_text(run, missing)


@pytest.mark.long
def test_lora_changes_only_the_tensors_it_adds(tuned: RunFolder, datasets_dir: Path) -> None:
    base, saved = Weights(tuned.imported / "model.safetensors"), Weights(last_weights(tuned))
    original = load_model(tuned.imported / "model.safetensors")
    expected = loss_on_first_batch(original, datasets_dir)
    assert first_loss(tuned) == pytest.approx(expected, rel=1e-5)
    added = saved.names() - base.names()
    assert added == {
        f"blocks.{part}.low_rank.{way}"
        for part in ("attention.query", "attention.output", "feed_forward.up", "feed_forward.down")
        for way in ("down", "up")
    }
    for name in base.names():
        assert saved.array(name).dtype == base.array(name).dtype
        assert saved.array(name).tobytes() == base.array(name).tobytes(), name
    for name in added:
        assert saved.array(name).dtype == np.float32
        assert np.abs(saved.array(name)).min() > 0
    moments = {key for key in final_arrays(tuned) if key.startswith("optimizer.") and ".mu." in key}
    assert {key.partition(".mu.")[2] for key in moments} == added


@pytest.mark.long
def test_merged_weights_are_the_kernel_plus_the_scaled_low_rank_matmul(
    tuned: RunFolder, datasets_dir: Path
) -> None:
    path = last_weights(tuned)
    plain, merged = Weights(path), MergedWeights(path)
    name = "blocks.attention.output.kernel"
    kernel, down, up = (
        plain.array(f"blocks.attention.output.{part}").astype(np.float64)
        for part in ("kernel", "low_rank.down", "low_rank.up")
    )
    expected = kernel + 12.0 / 3 * np.einsum("lnhr,lrd->lnhd", down, up)
    found = merged.array(name)
    assert found.dtype.name == "bfloat16"
    # rounding to bfloat16 changes a value by at most one part in 2^9
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-8, atol=1e-6)
    untouched = "blocks.attention.key.kernel"
    assert merged.array(untouched).tobytes() == plain.array(untouched).tobytes()
    last = metrics.read(tuned.metrics)[-1].validation_loss
    model = load_model(path)
    validation = np.mean(validation_losses(model, datasets_dir))
    assert last is not None
    assert validation == pytest.approx(last, rel=0.01)


def validation_losses(model: GPT, datasets_dir: Path) -> list[float]:
    from safetensors.numpy import load_file

    tokens = load_file(datasets_dir / "tiny" / f"{VALIDATION}.safetensors")["tokens"]
    rows = np.stack([tokens[i * 16 : i * 16 + 17] for i in range(16)]).astype(np.int32)
    chances = jax.nn.log_softmax(model(jnp.asarray(rows[:, :-1])))
    picked = jnp.take_along_axis(chances, jnp.asarray(rows)[:, 1:, None], axis=-1)
    return (-picked.mean(axis=(1, 2))).tolist()


@pytest.mark.parametrize(
    ("start_from", "message"),
    [
        ("no-such-run", "train.json: start_from: no-such-run: no such run, check"),
        (None, "start_from: missing, but"),
    ],
)
def test_unknown_weights_are_refused_and_imported_ones_not_ignored(
    start_from: str | None, message: str, datasets_dir: Path, tmp_path: Path
) -> None:
    run = imported_run(tmp_path / "run", start_from=start_from)
    assert message in refusal(run, datasets_dir)


def test_weights_of_another_architecture_are_refused_key_by_key(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = imported_run(tmp_path / "run")
    change_model(run, n_layers=1, qkv_bias=True)
    path = run.path / "model.json"
    lines = refusal(run, datasets_dir).splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"{path}: n_layers: 1",
        f"{path}: qkv_bias: true",
    ]


@pytest.mark.long
def test_weights_with_a_missing_tensor_are_refused_before_anything_moves(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = imported_run(tmp_path / "run", min_train_tokens=2 * 128)
    assert go(run, datasets_dir) == 0
    whole = Weights(run.imported / "model.safetensors")
    kept = {name: whole.array(name) for name in whole.names() - {"head.kernel"}}
    write_weights(run.imported, kept, whole.header, ONE_FILE)
    assert "tensor head.kernel: missing" in refusal(run, datasets_dir, fresh=True)


def test_imported_weights_may_be_sharded(tmp_path: Path) -> None:
    run = imported_run(tmp_path / "run")
    whole = Weights(run.imported / "model.safetensors")
    arrays = {name: whole.array(name) for name in whole.names()}
    (run.imported / "model.safetensors").unlink()
    write_weights(run.imported, arrays, whole.header, 10_000)
    found = find_starting_weights(run, run_config.load_run(run.path))
    assert found is not None
    assert found.path == run.imported / "model.safetensors.index.json"


def test_start_from_imported_without_an_import_is_refused(
    datasets_dir: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", start_from="imported")
    assert "nothing was imported" in refusal(run, datasets_dir)


def test_a_dataset_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    train_bpe(["a text"], 300).save(tmp_path / "tiny" / "tokenizer.json")
    run = imported_run(tmp_path / "run")
    train_bpe(["another another another"], 310).save(run.imported / "tokenizer.json")
    assert "not the model's tokenizer" in refusal(run, tmp_path)


@pytest.mark.long
def test_merging_is_exact_in_float32(tmp_path: Path, key: jax.Array) -> None:
    """The merged model has the logits of the model with LoRA, here with a file for each tensor."""
    architecture = model_config(feed_forward="swiglu", n_kv_heads=1)
    targets = ["query", "key", "value", "output", "gate", "up", "down"]
    lora = {"rank": 2, "alpha": 3.0, "targets": targets}
    train = train_config(lora=lora, start_from="imported")
    assert train.lora is not None
    model = GPT(architecture, key)
    tokens_BS = jax.random.randint(key, (2, 8), 0, architecture.vocab_size)
    before = model(tokens_BS)
    add_lora(model, train.lora, key)
    assert np.array_equal(model(tokens_BS), before)

    state = nnx.state(model)
    for names, param in nnx.to_flat_state(state):
        if "low_rank" in names:
            param.set_value(param.get_value() + 0.3)
    nnx.update(model, state)
    expected = model(tokens_BS)
    assert float(jnp.abs(expected - before).max()) > 0.1
    weights = {name: np.asarray(array) for name, array in named_arrays(model).items()}
    write_weights(tmp_path, weights, WeightsHeader(architecture, train, "gpt2"), 1)
    # rounding, which norms amplify, gives 1e-5; a wrong scale or sum gives more than 0.01
    np.testing.assert_allclose(load_model(tmp_path)(tokens_BS), expected, rtol=0, atol=1e-4)
