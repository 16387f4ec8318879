"""The embedded dataset, and the command that makes datasets."""

import hashlib
import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

import download_dataset
from rungs.common.errors import UserError
from rungs.data import python_stdlib
from rungs.data.catalog import open_dataset
from rungs.data.dataset import Dataset
from rungs.data.tokenizer_files import load_tokenizer
from tests.support.committed_runs import ROOT


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset("python-stdlib", tmp_path_factory.mktemp("datasets"))


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "dataset.json"
    }


def test_another_process_builds_the_same_bytes(embedded: Dataset, tmp_path: Path) -> None:
    environment = {
        "RAYON_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
        "RUNGS_DATASETS_DIR": str(tmp_path),
    }
    output = subprocess.run(
        [sys.executable, "download_dataset.py", "python-stdlib"],
        cwd=ROOT,
        env={**os.environ, **environment, "RUNGS_DATASETS_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert checksums(tmp_path / "python-stdlib") == checksums(embedded.folder)
    assert f"{embedded.description.splits['train'].tokens:,} tokens" in output
    assert "vocab_size 4096" in output


def test_what_it_holds(embedded: Dataset) -> None:
    tokenizer = load_tokenizer(embedded.folder)
    assert tokenizer.vocab_size == 4096
    assert len(tokenizer.encode(" you")) == 1
    assert embedded.description.source.python_version == sys.version.split()[0]
    texts = {
        split: tokenizer.decode(embedded.tokens(split)[:]).split("<|endoftext|>")[:-1]
        for split in embedded.splits
    }
    argparse = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    assert argparse in texts["train"] + texts["validation"]
    assert not set(filter(None, texts["train"])) & set(filter(None, texts["validation"]))
    assert 300 < len(texts["train"]) < 1500
    tokens = [embedded.description.splits[split].tokens for split in ("train", "validation")]
    assert 2e6 < tokens[0] < 6e6
    assert 0.02 < tokens[1] / sum(tokens) < 0.1


def test_it_is_built_once(embedded: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_stdlib, "fill", None)
    again = open_dataset("python-stdlib", embedded.folder.parent)
    assert again.description == embedded.description


def test_which_files_it_takes(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_bytes(b"\xff")
    for place in [
        "test/a.py",
        "x/tests/b.py",
        "site-packages/c.py",
        "_sysconfigdata_x.py",
        "d.txt",
    ]:
        (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / place).write_text("left out")
    wanted = [f"part/m{i}.py" for i in range(200)]
    (tmp_path / "part").mkdir()
    for place in wanted:
        (tmp_path / place).write_text(place)
    sections = python_stdlib._sections(tmp_path)
    places = {
        split: [part.path.relative_to(tmp_path).as_posix() for part in parts]
        for split, parts in sections.items()
    }
    assert sorted(places["train"] + places["validation"]) == sorted(wanted)
    assert 2 <= len(places["validation"]) <= 25
    assert all(names == sorted(names) for names in places.values())


def test_a_python_without_its_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="comes without the source"):
        python_stdlib._sections(tmp_path)


# The command


def test_the_command_makes_a_dataset_of_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, file in enumerate(files):
        file.write_text(f"some text {number}\n" * 500)
    place = ["--datasets-dir", str(tmp_path / "d")]
    options = ["--text", *map(str, files), "--name", "mine", "--vocab-size", "300", *place]
    result = CliRunner().invoke(download_dataset.main, options)
    assert result.exit_code == 0, result.output
    assert load_tokenizer(tmp_path / "d" / "mine").vocab_size <= 300
    tokenizer = str(tmp_path / "d" / "mine" / "tokenizer.json")
    options = ["--text", str(files[0]), "--name", "other", "--tokenizer", tokenizer, *place]
    result = CliRunner().invoke(download_dataset.main, options)
    assert result.exit_code == 0, result.output
    first, second = (tmp_path / "d" / name / "tokenizer.json" for name in ("mine", "other"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "b"],
        ["a", "--name", "b"],
        ["--text", "a"],
        ["--text", "a", "--name", "b", "--vocab-size", "300", "--tokenizer", "t"],
        ["--text", "a", "--name", "b", "--validation-percent", "100"],
    ],
)
def test_wrong_use_of_the_command(arguments: list[str]) -> None:
    assert CliRunner().invoke(download_dataset.main, arguments).exit_code == 2


def test_the_command_starts_without_heavy_modules() -> None:
    script = (
        "import sys, download_dataset; print({'jax', 'grain', 'huggingface_hub'} & {*sys.modules})"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == "set()"
