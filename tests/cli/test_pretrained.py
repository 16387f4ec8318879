"""`pretrained.py`: import and export."""

import sys
from pathlib import Path

from click.testing import CliRunner, Result

from rungs.cli import pretrained
from rungs.common.errors import UserError
from tests.support.published_models import MODELS, arrays, assert_same, copy


def run(*arguments: object) -> Result:
    return CliRunner().invoke(pretrained.main, list(map(str, arguments)))


def test_import_then_export(tmp_path: Path) -> None:
    result = run("import", MODELS / "llama", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "llama: llama, 0.1 MB, tensors: 30 float32" in result.output
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
