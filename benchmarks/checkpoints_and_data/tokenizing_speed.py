"""How fast documents become token files, compared with tiktoken's batch encoder; and the memory.

The tokenizer is one of GPT-2's size and pattern, trained here on the source code of the installed
Python packages, which are also the documents. Both sides use all cores and take turns: tiktoken
encodes the documents that are in memory already and throws the ids away; ours reads them from a
Parquet file and writes the dataset. Memory is the highest of a process that builds a dataset from
one or from several times as many documents. Linux only.
"""

from rungs.common.command import run_command

import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import spread
from rungs.data import catalog
from rungs.data.build.document_dataset import Request
from rungs.data.build.document_files import local_files
from rungs.data.text.batch_encoder import as_tiktoken
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer

VOCABULARY = 50_257
TRAINING_CHARACTERS = 16_000_000


@click.command()
@click.option("--megabytes", default=60, show_default=True, help="Of text.")
@click.option("--turns", default=5, show_default=True)
@click.option("--build", nargs=2, type=click.Path(path_type=Path), hidden=True)
def main(megabytes: int, turns: int, build: tuple[Path, Path] | None) -> None:
    """Print megabytes of text per second of both sides, their ratio, and our memory."""
    if build is not None:
        build_dataset(*build, load_tokenizer(build[1].parent))
        return
    texts = source_texts(megabytes * 1_000_000)
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = train_bpe(first_characters(texts, TRAINING_CHARACTERS), VOCABULARY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder / "tokenizer.json")
        write_parquet(folder / "once.parquet", texts)
        write_parquet(folder / "often.parquet", texts * 5)
        click.echo(
            f"{len(texts):,} documents, {size:.1f} MB, vocabulary {tokenizer.vocab_size:,}\n"
        )
        compare(folder, texts, tokenizer, size, turns)
        for kind in ("once", "often"):
            click.echo(f"highest memory, {kind}: {memory(folder, kind):,.0f} MB")


def source_texts(size: int) -> list[str]:
    """Return different documents with so many characters at least, if there are enough."""
    found: dict[bytes, str] = {}
    for place in map(Path, [os.__file__, pa.__file__]):
        for path in sorted(place.parent.parent.rglob("*.py")):
            text = path.read_text(errors="replace")
            found.setdefault(hashlib.sha256(text.encode()).digest(), text)
            size -= len(text)
            if size < 0:
                return list(found.values())
    return list(found.values())


def first_characters(texts: list[str], size: int) -> list[str]:
    chosen = []
    for text in texts:
        chosen.append(text)
        size -= len(text)
        if size < 0:
            break
    return chosen


def write_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)


def compare(folder: Path, texts: list[str], tokenizer: Tokenizer, size: float, turns: int) -> None:
    fast = as_tiktoken(tokenizer)
    assert fast is not None
    ours, theirs = [], []
    for turn in range(turns):
        start = time.perf_counter()
        build_dataset(folder / "once.parquet", folder / f"datasets-{turn}", tokenizer)
        ours.append(size / (time.perf_counter() - start))
        start = time.perf_counter()
        fast.encode_batch(texts, num_threads=os.cpu_count() or 1, allowed_special="all")
        theirs.append(size / (time.perf_counter() - start))
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    click.echo(f"Rungs, a whole dataset, MB/s  {spread(ours, 1)}")
    click.echo(f"tiktoken, encode_batch, MB/s  {spread(theirs, 1)}")
    click.echo(f"Rungs ÷ tiktoken              {spread(ratios)}")


def build_dataset(file: Path, datasets_dir: Path, tokenizer: Tokenizer) -> None:
    request = Request(local_files([file], "parquet"), tokenizer, None, 1, None)
    catalog.build_documents_dataset("speed", request, datasets_dir)


def memory(folder: Path, kind: str) -> float:
    """Return the highest resident memory of a process that builds a dataset, in MB."""
    files = map(str, (folder / f"{kind}.parquet", folder / kind))
    subprocess.run([sys.executable, __file__, "--build", *files], check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3


if __name__ == "__main__":
    run_command(main)
