"""`pretrained.py`: import, export, and the comparison with transformers."""

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rungs.cli import pretrained
from rungs.common.errors import RunFailure, UserError
from rungs.config.model_config import ModelConfig
from rungs.huggingface import transformers_check
from rungs.huggingface.agreement import TOLERANCE, Activations, nearness, predictions
from rungs.huggingface.transformers_check import DivergenceError, sample_tokens
from tests.support.published_models import MODELS, arrays, assert_same, copy, expected


def run(*arguments: object) -> Result:
    return CliRunner().invoke(pretrained.main, list(map(str, arguments)))


def test_import_then_export(tmp_path: Path) -> None:
    result = run("import", MODELS / "llama", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "llama: llama, 0.00 GB, tensors: 30 float32" in result.output
    assert '"start_from": "imported"' in result.output
    result = run("export", tmp_path / "run", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "written without a tokenizer" in result.output
    assert_same(arrays(tmp_path / "out"), arrays(MODELS / "llama"))


def test_notes_on_tensors_that_are_left_out_are_printed(tmp_path: Path) -> None:
    result = run("import", MODELS / "gemma3-vision", tmp_path / "run")
    assert "left out: 23 tensors (the vision tower and its projector)" in result.output


def test_errors_leave_nothing_behind(tmp_path: Path) -> None:
    source = copy("llama", tmp_path / "source", odd=1)
    result = run("import", source, tmp_path / "run")
    assert isinstance(result.exception, UserError)
    assert "--ignore-key odd" in str(result.exception)
    assert not (tmp_path / "run").exists()
    result = run("import", source, tmp_path / "run", "--ignore-key", "odd")
    assert result.exit_code == 0, result.output
    result = run("import", source, tmp_path / "run", "--ignore-key", "odd")
    assert "exists already" in str(result.exception)
    result = run("export", tmp_path / "run", tmp_path / "run")
    assert "exists already" in str(result.exception)
    result = run("export", tmp_path / "run", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_check_needs_transformers(tmp_path: Path) -> None:
    for options, message in (
        (("--check", "--python", sys.executable), "uv pip install --torch-backend cpu torch"),
        (("--check", "--python", tmp_path / "none"), "none: cannot be started: No such file"),
        (("--python", sys.executable), "--python: is for --check"),
    ):
        result = run("import", MODELS / "llama", tmp_path / "run", *options)
        assert isinstance(result.exception, UserError)
        assert message in str(result.exception)
        assert not (tmp_path / "run").exists()


def test_transformers_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rungs.huggingface.transformers_check.require_transformers", lambda _: None)
    result = run("import", MODELS / "llama", tmp_path / "run", "--check")
    assert isinstance(result.exception, RunFailure)
    assert "could not be checked, because transformers failed: ModuleNotFound" in str(
        result.exception
    )
    assert list(tmp_path.iterdir()) == []


# The comparison, with recorded values instead of transformers


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Activations:
    """What transformers computed for the fixture gpt2."""
    values = expected("gpt2")
    activations = Activations(list(values["hidden_states"][:, 0]), values["logits"][0])
    monkeypatch.setattr(transformers_check, "sample_tokens", lambda _: values["tokens"][0])
    monkeypatch.setattr(transformers_check, "_transformers_activations", lambda *_: activations)
    monkeypatch.setattr("rungs.huggingface.transformers_check.require_transformers", lambda _: None)
    return activations


@pytest.mark.usefixtures("recorded")
def test_a_check_passes_if_all_layers_agree(tmp_path: Path) -> None:
    result = run("import", MODELS / "gpt2", tmp_path / "run", "--check")
    assert result.exit_code == 0, result.output
    states = ("  embedding", "  block", "  logits")
    rows = [line.split() for line in result.output.splitlines() if line.startswith(states)]
    assert len(rows) == 5
    for *_, difference, cosine in rows:
        assert float(difference) < 1e-5
        assert float(cosine) == pytest.approx(1, abs=1e-9)
    assert "agrees after 24 of 24 tokens" in result.output
    assert "agrees with transformers: no difference is above 0.0001" in result.output
    assert "diverges" not in result.output


def test_a_failed_check_names_the_first_layer_and_undoes_the_import(
    tmp_path: Path, recorded: Activations
) -> None:
    for state in recorded.hidden_states[2:]:
        state[5] *= 1.001
    result = run("import", MODELS / "gpt2", tmp_path / "run", "--check")
    assert result.exit_code == 1
    assert "error: diverges from transformers at block 1 (1.0e-03)" in result.output
    assert list(tmp_path.iterdir()) == []


def test_the_final_norm_is_part_of_the_last_layer(tmp_path: Path, recorded: Activations) -> None:
    recorded.hidden_states[-1][5] *= 1.001
    result = run("import", MODELS / "gpt2", tmp_path / "run", "--check")
    assert "error: diverges from transformers at block 2 and final norm (1.0e-03)" in result.output


def test_a_nan_diverges(tmp_path: Path, recorded: Activations) -> None:
    recorded.hidden_states[0][0, 0] = np.nan
    with pytest.raises(DivergenceError, match="at embedding"):
        transformers_check.compare(MODELS / "gpt2", imported(tmp_path), "", lambda _: None)


def imported(folder: Path) -> Path:
    assert run("import", MODELS / "gpt2", folder / "run").exit_code == 0
    return folder / "run" / "checkpoints" / "imported"


def test_errors_are_relative_to_the_norm_of_each_token() -> None:
    states = np.asarray([[1e6, 0], [0, 1.0]], np.float32)
    other = states + np.asarray([[1.0, 0], [0, 0.01]], np.float32)
    found = nearness(Activations([other], states), Activations([states], states))
    assert found["embedding"].difference == pytest.approx(0.01)
    assert found["logits"].difference == 0
    assert TOLERANCE < 0.01


def test_cosines_and_predictions_are_those_of_the_formulas() -> None:
    expected = np.asarray([[3.0, 0.0, 1.0], [0.0, 2.0, 0.0], [1.0, 1.1, 0.0]], np.float32)
    found = expected.copy()
    found[1], found[2] = [0.0, 1.9, 0.2], [1.1, 1.0, 0.0]
    near = nearness(Activations([found], found), Activations([expected], expected))
    cosines = [
        float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
        for a, b in zip(found, expected, strict=True)
    ]
    assert near["embedding"].cosine == pytest.approx(min(cosines))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (expected, found))
    divergence, same, tokens = predictions(found, expected)
    assert divergence == pytest.approx((p * np.log(p / q)).sum(-1).max(), rel=1e-4)
    assert (same, tokens) == (2, 3)
    assert predictions(expected + 50, expected)[0] == pytest.approx(0, abs=1e-12)


def test_sample_is_longer_than_the_window_if_affordable() -> None:
    def length(window: int | None, context: int) -> int:
        model = ModelConfig(
            vocab_size=9,
            context_length=context,
            emb_dim=4,
            n_layers=1,
            n_heads=1,
            sliding_window=window,
        )
        return len(sample_tokens(model))

    assert length(None, 4096) == 64
    assert length(None, 20) == 20
    assert length(512, 4096) == 528
    assert length(4096, 32768) == 64
