"""`checkpointing.py --average`: the mean of several checkpoints' weights."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from rungs.checkpointing.checkpoint_folder import list_checkpoints, list_run
from rungs.checkpointing.load import load_model
from rungs.checkpointing.manifest import read_checkpoint, write_manifest
from rungs.checkpointing.weights_file import Weights, write_weights
from rungs.cli import checkpointing
from rungs.common.errors import UserError
from rungs.run.folder import RunFolder
from rungs.step.state import shapes_of
from tests.support.configs import ONE_FILE
from tests.support.tiny_run import make_run
from tests.support.written_checkpoints import write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with checkpoints of random weights after steps 1, 2 and 3."""
    run = make_run(tmp_path / "run")
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        folder = run.checkpoints / f"2026010{step}Z000000-step-00000{step}"
        write_checkpoint(folder, step, 2.0)
        (folder / "tokenizer.json").write_text("{}")
        weights = Weights(folder / "model.safetensors")
        shapes = shapes_of(weights.header.model)
        arrays = {name: rng.normal(0, 1, shape).astype("f4") for name, shape in shapes.items()}
        write_weights(folder, arrays, weights.header, ONE_FILE)
        meta = read_checkpoint(folder).meta
        (folder / "meta.json").unlink()
        write_manifest(folder, meta)
    return run


def average(run: RunFolder, count: int) -> str:
    ended = CliRunner().invoke(checkpointing.main, [str(run.path), "--average", str(count)])
    if isinstance(ended.exception, UserError):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_it_is_the_mean_of_the_last_ones(run: RunFolder) -> None:
    output = average(run, 2)
    assert f"{run.checkpoints / 'average-2'}: the mean of steps 2, 3" in output
    written = Weights(run.checkpoints / "average-2" / "model.safetensors")
    last = [checkpoint.weights for checkpoint in list_checkpoints(run.checkpoints)][1:]
    for name in written.names():
        expected = np.mean([one.array(name) for one in last], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(written.array(name), expected.astype(np.float32))
    assert written.tokenizer_file is not None
    model = load_model(run.checkpoints / "average-2")
    assert np.isfinite(model(jnp.zeros((1, 3), jnp.int32))).all()
    assert next(one.name for one in list_run(run, verify=True)) == "average-2"
    shutil.rmtree(list_checkpoints(run.checkpoints)[-1].folder)
    assert "the mean of steps 1, 2" in average(run, 2)  # replaces it


def test_what_it_cannot_average_is_said(run: RunFolder) -> None:
    with pytest.raises(UserError, match=r"--average 4: .* has 3 checkpoints; keep more with keep"):
        average(run, 4)
    ended = CliRunner().invoke(checkpointing.main, [str(run.path), "--average", "2", "--verify"])
    assert "leave out --verify and --json" in str(ended.exception)
    (list_checkpoints(run.checkpoints)[-1].folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"damaged \(model.safetensors\)"):
        average(run, 3)
    assert not (run.checkpoints / "average-3").exists()


def test_one_that_can_not_be_used_is_not_left_out(run: RunFolder) -> None:
    for step, averaged in ((0, "the mean of steps 2, 3"), (2, None)):
        meta = sorted(run.checkpoints.glob("*-step-*/meta.json"))[step]
        meta.write_text("{")
        if averaged:
            assert averaged in average(run, 2)
    write_checkpoint(run.checkpoints / "20260104Z000000-step-000004", 4, 2.0)
    with pytest.raises(UserError, match="step-000003"):
        average(run, 2)


def test_an_average_that_was_changed_is_refused(run: RunFolder) -> None:
    average(run, 2)
    path = run.checkpoints / "average-2" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        load_model(path)
