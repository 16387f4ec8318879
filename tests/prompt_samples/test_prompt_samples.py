"""What a run says to its prompts at each checkpoint."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.load import load_model, load_tokenizer
from rungs.cli import charts
from rungs.run import records
from rungs.run.folder import RunFolder
from tests.prompt_samples.conftest import PROMPTS, prompted_run
from tests.support.starting import go, refusal
from tests.support.tiny_run import MODEL, assert_same_outcome, change, train


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """A finished run with prompts; tests must not change it."""
    run = prompted_run(tmp_path_factory.mktemp("sampled") / "run", keep_checkpoints=-1)
    assert go(run, datasets_dir) == 0
    assert "WARNING" not in run.log.read_text()
    return run


def texts(run: RunFolder) -> dict[tuple[int, str, str], str]:
    return {(one.step, one.prompt, one.kind): one.text for one in records.read_samples(run)}


def test_each_checkpoint_continues_each_prompt_twice(sampled: RunFolder) -> None:
    steps = [checkpoint.step for checkpoint in list_checkpoints(sampled.checkpoints)]
    assert steps == [0, 5, 10, 15, 20, 23]
    expected = {(s, p, kind) for s in steps for p in PROMPTS for kind in ("greedy", "sampled")}
    assert texts(sampled).keys() == expected
    assert len(sampled.prompt_samples.read_text().splitlines()) == len(expected)
    assert not (sampled.path / ".sampling").exists()


def test_greedy_texts_are_the_most_likely_tokens(sampled: RunFolder) -> None:
    """Compared with the whole model, token by token, without a cache."""
    logits_of = nnx.jit(lambda model, tokens_BS: model(tokens_BS))
    for checkpoint in list_checkpoints(sampled.checkpoints)[1:4:2]:
        model, tokenizer = load_model(checkpoint.folder), load_tokenizer(checkpoint.folder)
        tokens = tokenizer.encode(PROMPTS[0])
        count = len(tokens)
        for _ in range(6):
            padded = tokens + [0] * (MODEL["context_length"] - len(tokens))  # one shape to compile
            logits = logits_of(model, jnp.asarray([padded]))
            tokens.append(int(np.argmax(logits[0, len(tokens) - 1])))
        expected = tokenizer.decode(tokens).removeprefix(tokenizer.decode(tokens[:count]))
        assert texts(sampled)[checkpoint.step, PROMPTS[0], "greedy"] == expected


@pytest.mark.long
def test_it_does_not_change_the_run(sampled: RunFolder, datasets_dir: Path, tmp_path: Path) -> None:
    plain = prompted_run(tmp_path / "run", keep_checkpoints=-1, sample_prompts=[])
    assert go(plain, datasets_dir) == 0
    assert not plain.prompt_samples.exists()
    assert_same_outcome(sampled, plain)


@pytest.mark.long
def test_going_back_drops_later_samples(datasets_dir: Path, tmp_path: Path) -> None:
    run = prompted_run(tmp_path / "run", keep_checkpoints=-1)
    assert go(run, datasets_dir) == 0
    change(run, sample_prompts=["another"])
    assert go(run, datasets_dir, rewind_to="step-000010") == 0
    prompts = {(one.step, one.prompt) for one in records.read_samples(run)}
    assert {step for step, prompt in prompts if prompt == PROMPTS[0]} == {0, 5, 10}
    assert {step for step, prompt in prompts if prompt == "another"} == {0, 5, 10, 15, 20, 23}


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (["a text " * 20], "more than the model's context_length 16; shorten it"),
        ([3], "sample_prompts"),
        ("a text", "sample_prompts"),
    ],
)
def test_bad_prompts_are_refused(
    prompts: object, line: str, datasets_dir: Path, tmp_path: Path
) -> None:
    run = prompted_run(tmp_path / "run", sample_prompts=prompts)
    [found] = refusal(run, datasets_dir).splitlines()
    assert line in found


def test_the_terminal_shows_them(sampled: RunFolder, tmp_path: Path) -> None:
    output = CliRunner().invoke(charts.main, [str(sampled.path), "--samples"]).output
    assert f"'{PROMPTS[0]}', greedy" in output
    assert f"  step        5  {texts(sampled)[5, PROMPTS[0], 'greedy']!r}" in output
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("model.json", "train.json"):
        (empty / name).write_text((sampled.path / name).read_text())
    result = CliRunner().invoke(charts.main, [str(empty), "--samples"])
    assert "no samples yet" in str(result.exception)


@pytest.mark.long
def test_a_process_that_fails_costs_a_warning(datasets_dir: Path, tmp_path: Path) -> None:
    run = prompted_run(tmp_path / "run", min_train_tokens=256)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n'rungs.evaluation.prompt_samples' in sys.orig_argv and sys.exit('broken')\n"
    )
    result = train(run, datasets_dir, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0
    assert "WARNING samples: its process ended with exit code 1" in run.log.read_text()
    assert len(list_checkpoints(run.checkpoints)) == 2
