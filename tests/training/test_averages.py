"""`ema_decay`: averaged weights against float64 sums, in checkpoints, and in the commands."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

from rungs.checkpointing.checkpoint_folder import find_averaged_weights, list_checkpoints
from rungs.checkpointing.load import load_model
from rungs.cli import evaluate, generate, pretrained
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig, load_run
from rungs.data.build.task_dataset import character_tokenizer
from rungs.objectives.table import make_train_step
from rungs.optim.skipping_optimizer import WEIGHTS, AveragedWeights
from rungs.parallel.sharding import place_batch
from rungs.planning.memory import memory_of
from rungs.report.run_charts import loss_chart
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.recorded_run import RecordedRun
from rungs.run.step_table import StepTable
from rungs.step.state import AbstractState, create_model_and_optimizer, named_arrays
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.tiny_run import (
    final_arrays,
    make_dataset,
    make_run,
)

DECAY = 0.9
SHORT: dict[str, Any] = {"min_train_tokens": 8 * 128, "checkpoint_interval": 1}


def mean64(history: list[np.ndarray], decay: float) -> np.ndarray:
    """Return the mean of arrays, the last one with the weight 1, in float64."""
    weights = decay ** np.arange(len(history) - 1, -1, -1, dtype=np.float64)
    return np.tensordot(weights / weights.sum(), np.array(history, np.float64), axes=1)


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.99999])
def test_the_mean_is_that_of_float64(decay: float) -> None:
    rng = np.random.default_rng(0)
    averages = AveragedWeights(nnx.State({"w": nnx.Param(jnp.full(50, 7.0))}), decay)
    add = jax.jit(lambda held, w, applied: add_purely(held, w, applied, decay))
    held, history = (averages.updates[...], averages.weights["w"][...]), []
    for number in range(60):
        w, applied = rng.normal(1, 1, 50).astype(np.float32), number % 4 != 1
        history += [w] if applied else []
        held = add(held, w, jnp.asarray(applied))
        np.testing.assert_allclose(held[1], mean64(history, decay), rtol=3e-6, atol=3e-6)
    assert held[0] == len(history) == 45


def add_purely(held: Any, w: Any, applied: Any, decay: float) -> Any:
    averages = AveragedWeights(nnx.State({"w": nnx.Param(held[1])}), decay)
    averages.updates.set_value(held[0])
    averages.add(nnx.State({"w": nnx.Param(w)}), applied)
    return averages.updates[...], averages.weights["w"][...]


CASES: list[tuple[dict[str, Any], tuple[int, int, str]]] = [
    (
        {"lora": {"rank": 2, "alpha": 4, "targets": ["up"]}, "start_from": "x"},
        (4, 1, "dp"),
    ),
    ({"compute_dtype": "float16"}, (2, 2, "fsdp_tp")),
    ({"optimizer": "muon", "cautious_weight_decay": True}, (2, 2, "cp")),
]


@pytest.mark.long
@pytest.mark.parametrize(("keys", "sizes"), CASES, ids=["lora", "float16", "muon"])
def test_each_applied_update_is_averaged(keys: dict[str, Any], sizes: tuple[int, int, str]) -> None:
    """With a step that isn't applied, as all its losses are not finite or above the limit."""
    data, last, mode = sizes
    axis = "context" if mode == "cp" else "tensor"
    train = train_config(ema_decay=DECAY, sharding={"mode": mode, "data": data, axis: last}, **keys)
    mesh = mesh_of(*sizes)
    model, optimizer = create_model_and_optimizer(
        RunConfig(model_config(vocab_size=31), train), 20, mesh
    )
    step = make_train_step(train, mesh)
    names = {name.removeprefix(WEIGHTS) for name in named_arrays(optimizer) if WEIGHTS in name}
    trained = nnx.state(model, optimizer.wrt)
    assert len(names) == len(jax.tree.leaves(trained))
    history: list[dict[str, np.ndarray]] = []
    for number in range(6):
        tokens = np.random.default_rng(number).integers(0, 31, (1, 4, 9), dtype=np.int32)
        batch = place_batch(mesh, tokens[..., :-1].copy(), tokens[..., 1:].copy())
        result = step(model, optimizer, *batch, loss_limit=0.0 if number == 3 else np.inf)
        if not result.skipped:
            arrays = named_arrays(model)
            history.append({name: np.asarray(arrays[name]) for name in names})
    assert len(history) == 5
    found = named_arrays(optimizer)
    for name in names:
        expected = mean64([one[name] for one in history], DECAY)
        np.testing.assert_allclose(found[WEIGHTS + name], expected, rtol=2e-6, atol=1e-7)
    moments = {n: a for n, a in found.items() if ".mu." in n}
    for name, moment in moments.items():
        averaged = found.get(WEIGHTS + name.split(".mu.")[1].removesuffix(".value"))
        assert averaged is None or averaged.sharding == moment.sharding


def test_without_it_there_are_no_arrays_and_the_plan_counts_them_with_it() -> None:
    model = model_config()
    off, on = (RunConfig(model, train_config(**keys)) for keys in ({}, {"ema_decay": DECAY}))
    extra = AbstractState(on, 1).optimizer.keys() - AbstractState(off, 1).optimizer.keys()
    weights = AbstractState(off, 1).weights
    assert extra == {WEIGHTS + name for name in weights} | {"ema.updates"}
    moments = [memory_of(config, mesh_of(1)).moments for config in (off, on)]
    assert moments[1] - moments[0] == 4 * sum(a.size for a in weights.values()) + 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, and two runs of the same training, one with averages."""
    place = tmp_path_factory.mktemp("place")
    make_dataset(place / "datasets")
    letters = "".join(map(chr, range(48, 48 + 63)))
    character_tokenizer(letters).save(place / "datasets" / "tiny" / "tokenizer.json")
    keys = SHORT | {"keep_checkpoints": -1, "validation_interval": 1}
    go(make_run(place / "plain", **keys), place)
    go(make_run(place / "run", **keys, ema_decay=DECAY), place)
    return place


def go(run: RunFolder, place: Path) -> None:
    assert launch(run, load_run(run.path), StartOptions(), on_datasets(place / "datasets")) == 0


@pytest.mark.long
def test_a_run_is_the_same_with_averages_and_has_their_loss(place: Path) -> None:
    plain, run = RunFolder(place / "plain"), place / "run"
    found, expected = final_arrays(RunFolder(run)), final_arrays(plain)
    for name, array in expected.items():
        # rounding, as XLA compiles two programs; a step moves a weight by up to 0.01
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
    steps = metrics.read(RunFolder(run).metrics)
    # the first average is the weights themselves
    assert steps[0].ema_validation_loss == pytest.approx(steps[0].validation_loss, rel=1e-6)
    assert all(step.ema_validation_loss is not None for step in steps)
    assert metrics.read(plain.metrics)[-1].ema_validation_loss is None
    arguments = [str(run), "--datasets-dir", str(place / "datasets")]
    told = CliRunner().invoke(evaluate.main, [*arguments, "--weights", "ema"]).output
    best = StepTable.read(RunFolder(run).metrics).best(3)
    assert best is not None
    assert f"loss           {steps[best.step].ema_validation_loss:.4f} nats" in told
    chart = loss_chart(RecordedRun.load(str(run)))
    labels = [text.get_text().strip() for legend in chart.legends for text in legend.get_texts()]
    assert "validation, averaged weights" in labels


@pytest.mark.long
def test_the_average_of_saved_weights_is_that_of_float64(place: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(place / "run", tmp_path / "run", symlinks=True))
    checkpoints = list_checkpoints(run.checkpoints)
    averaged = checkpoints[-1].averaged_weights
    assert averaged is not None
    for name in averaged.names():
        history = [checkpoint.weights.array(name) for checkpoint in checkpoints]
        expected = mean64(history, DECAY)
        np.testing.assert_allclose(averaged.array(name), expected, rtol=2e-6, atol=1e-7)
    model = load_model(find_averaged_weights(checkpoints[-1].folder))
    assert model(jnp.zeros((1, 4), jnp.int32)).shape == (1, 4, 64)
    assert checkpoints[-1].damage() == []
    (checkpoints[-1].folder / "ema" / "model.safetensors").write_bytes(b"")
    assert checkpoints[-1].damage() == ["ema/model.safetensors"]
    with pytest.raises(UserError, match="damaged"):
        load_model(find_averaged_weights(checkpoints[-1].folder))


@pytest.mark.long
def test_a_branch_may_begin_to_average_but_not_stop(place: Path, tmp_path: Path) -> None:
    from tests.training.test_branches import branch

    child = branch(place, tmp_path / "child", 3, f"ema_decay={DECAY}", parent=place / "plain")
    steps = metrics.read(child.metrics)
    assert steps[6].ema_validation_loss is not None
    with pytest.raises(UserError, match=r"ema_decay: was 0.9 when step 6 .* is now null"):
        branch(place, tmp_path / "other", 6, "ema_decay=null", parent=place / "run")


@pytest.mark.long
def test_the_commands_use_the_averages(place: Path, tmp_path: Path) -> None:
    run = str(place / "run")
    told = CliRunner().invoke(generate.main, [run, "01", "--weights", "ema", "--new-tokens", "3"])
    assert told.exit_code == 0, told.output
    assert f"{os.sep}ema{os.sep}model.safetensors" in told.output
    exported = tmp_path / "exported"
    arguments = ["export", run, str(exported), "--weights", "ema"]
    assert CliRunner().invoke(pretrained.main, arguments).exit_code == 0
    from safetensors.numpy import load_file

    written = load_file(exported / "model.safetensors")
    best = find_averaged_weights(run)
    assert any(
        np.array_equal(array, load_file(best)["token_embedding.embedding"])
        for array in written.values()
    )
    assert json.loads((exported / "config.json").read_text())


def test_weights_without_an_average_say_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"--weights ema: .* has no averaged weights, which are"):
        find_averaged_weights(tmp_path)
