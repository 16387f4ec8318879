"""The dataset python-stdlib, and the command download_dataset.py."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.data.build import text_dataset
from rungs.data.catalog import open_dataset
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import Dataset
from tests.support.committed_runs import ROOT

STDLIB = Path(sysconfig.get_path("stdlib"))
PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest", "xml")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the standard library."""
    folder = tmp_path_factory.mktemp("library")
    for package in PACKAGES:
        shutil.copytree(STDLIB / package, folder / package)
    return folder


@pytest.fixture(scope="module")
def part_dataset(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The dataset built from a part of the library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(library))
        return open_dataset("python-stdlib", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def full_dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset("python-stdlib", tmp_path_factory.mktemp("datasets"))


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "dataset.json"
    }


OTHER_PROCESS = """
import sys, sysconfig
from rungs.cli import download_dataset
library = sys.argv.pop()
sysconfig.get_path = lambda _: library
download_dataset.main(["python-stdlib"])
"""


def build_elsewhere(datasets_dir: Path, *program: object) -> str:
    """Run a program that builds the dataset with one thread and another hash seed."""
    environment = {
        "RAYON_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
        "RUNGS_DATASETS_DIR": str(datasets_dir),
    }
    return subprocess.run(
        [sys.executable, *map(str, program)],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.long
def test_another_process_builds_the_same_bytes(
    part_dataset: Dataset, library: Path, tmp_path: Path
) -> None:
    output = build_elsewhere(tmp_path, "-c", OTHER_PROCESS, library)
    assert checksums(tmp_path / "python-stdlib") == checksums(part_dataset.folder)
    assert f"{part_dataset.description.splits['train'].tokens:,} tokens" in output
    assert "vocab_size 4096" in output


@pytest.mark.long
def test_the_contents_of_the_full_dataset(full_dataset: Dataset) -> None:
    tokenizer = load_tokenizer(full_dataset.folder)
    assert tokenizer.vocab_size == 4096
    assert len(tokenizer.encode(" you")) == 1
    assert full_dataset.description.source.python_version == sys.version.split()[0]
    texts = {
        split: tokenizer.decode(full_dataset.tokens(split)[:]).split("<|endoftext|>")[:-1]
        for split in full_dataset.splits
    }
    argparse = (STDLIB / "argparse.py").read_text(encoding="utf-8")
    assert argparse in texts["train"] + texts["validation"]
    assert not set(filter(None, texts["train"])) & set(filter(None, texts["validation"]))
    assert 300 < len(texts["train"]) < 1500
    tokens = [full_dataset.description.splits[split].tokens for split in ("train", "validation")]
    assert 2e6 < tokens[0] < 6e6
    assert 0.02 < tokens[1] / sum(tokens) < 0.1


def test_the_files_it_includes(tmp_path: Path) -> None:
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
    sections = text_dataset._split_library(tmp_path)
    places = {
        split: [part.path.relative_to(tmp_path).as_posix() for part in parts]
        for split, parts in sections.items()
    }
    assert sorted(places["train"] + places["validation"]) == sorted(wanted)
    assert 2 <= len(places["validation"]) <= 25
    assert all(names == sorted(names) for names in places.values())


def test_a_python_without_source_code_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no source code"):
        text_dataset._split_library(tmp_path)


# The command


def test_the_command_imports_no_heavy_modules() -> None:
    script = (
        "import sys, download_dataset; print({'jax', 'grain', 'huggingface_hub'} & {*sys.modules})"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == "set()"
