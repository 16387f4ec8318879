"""Options of `download_dataset.py` that don't go together, and documents from files."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import run_script
from tests.support.document_files import json_lines, parquet, texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parquet --jsonl a --name x", "--parquet and --jsonl build different datasets"),
        ("--parquet a", "--parquet needs a --name"),
        ("--parquet a --name x --config c", "--config is for repositories on the hub"),
        ("python-stdlib --files x", "to build a dataset from files, add --text"),
        ("--text a --name x --text-column c", "--text-column is for documents, not for --text"),
        ("--text a --name x --max-bytes 9", "--max-bytes is for documents, not for --text"),
        ("a/b c/d", "to build a dataset from files"),
        ("--tokens --jsonl a --name x", "--jsonl and --tokens build different datasets"),
        ("--tokens a.bin --name x", "--tokens needs the --tokenizer that made them, or its"),
        ("--tokens a.npy --name x --vocab-size 0", "the vocabulary has 0"),
        ("--text a.txt --name x --vocab-size 0", "a vocabulary of 0 is too small"),
        ("--pairs pairs.jsonl --name x --vocab-size 0", "a vocabulary of 0 is too small"),
        ("--jsonl a.jsonl --name x --vocab-size 256", "a vocabulary of 256 is too small"),
        ("--chats a.jsonl --name x --tokenizer t --vocab-size 0", "--chats needs the --tokenizer"),
        ("--text a.txt --name x --tokenizer t --vocab-size 0", "do not go together"),
        ("python-stdlib --validation-percent 0", "to build a dataset from files, add --text"),
        ("--pairs pairs.jsonl --name a/b", "this name is reserved"),
        ("--tokens a.npy --name python-stdlib --vocab-size 99", "this name is reserved"),
        (
            "--tokens a.npy --name x --vocab-size 99 --validation-file b --validation-percent 1",
            "--validation-file and --validation-percent do not go together",
        ),
        ("--text a.txt --name x --split a", "--split is for repositories on the hub"),
        ("--text a.txt --name x --max-tokens 5", "--max-tokens is for --chats or --preferences"),
        ("python-stdlib --validation-file a.bin", "to build a dataset from files, add --text"),
        ("--jsonl missing.jsonl --name x", "missing.jsonl: cannot be read"),
        (
            "--jsonl a.txt --name x",
            "a.txt: its name does not end like the name of a file of json lines",
        ),
        ("--text a.txt --name x --vocab-size 99999999999999999999", "--vocab-size"),
        ("--text a.txt --name x --validation-percent nan", "nan is not a finite number"),
        (
            "d --near-duplicates 0.8",
            "--near-duplicates needs",
        ),
        ("--text a.txt --name x --near-duplicates 0.8", "needs the NAME of one dataset"),
        ("--parquet broken.parquet --name x", "broken.parquet: cannot be read"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "broken.parquet"):
        (tmp_path / name).write_text("text")
    np.save(tmp_path / "a.npy", np.arange(99))
    (tmp_path / "a.jsonl").write_bytes(json_lines({"text": "t"}))
    (tmp_path / "pairs.jsonl").write_bytes(json_lines(*[{"prompt": "p", "answer": "a"}] * 2))
    finished = run_script("download_dataset.py", *arguments.split(), "--datasets-dir", "d")
    assert finished.returncode == 2
    assert message in finished.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("d/*"))


def test_parquet_files_become_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(body=texts(200)))
    options = ("--name", "mine", "--vocab-size", 300, "--validation-percent", 10)
    finished = run_script(
        "download_dataset.py", "--parquet", path, *options, "--datasets-dir", tmp_path / "d"
    )
    assert finished.returncode == 0, finished.stderr
    assert "from 200 documents in 1 file" in finished.stdout
    assert "vocab_size 300" in finished.stdout
