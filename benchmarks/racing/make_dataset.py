"""Make a dataset from the text files of a folder and those below it, in random order.

The dataset of the race on a GPU: Linux 6.1, 260 MB of it, with 32,768 tokens in the vocabulary.
"""

from rungs.common.command import run_command

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
SEED = 0


@click.command()
@click.argument("text", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--name", default="linux", show_default=True)
@click.option("--vocab-size", default=32768, show_default=True)
@click.option("--max-bytes", default=260_000_000, show_default=True)
@click.option("--datasets-dir", required=True, type=click.Path(path_type=Path))
def main(text: Path, name: str, vocab_size: int, max_bytes: int, datasets_dir: Path) -> None:
    """Make a dataset from the text files in TEXT, 2% of it for validation."""
    files = sorted(path for path in text.rglob("*") if path.is_file() and not path.is_symlink())
    random.Random(SEED).shuffle(files)
    left = max_bytes
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as documents:
        for path in files:
            try:
                content = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if 0 < len(content) <= left:
                documents.write(json.dumps({"text": content}) + "\n")
                left -= len(content.encode())
        documents.flush()
        options = ["--name", name, "--vocab-size", str(vocab_size), "--validation-percent", "2"]
        command = [sys.executable, str(ROOT / "download_dataset.py"), "--jsonl", documents.name]
        subprocess.run([*command, *options, "--datasets-dir", str(datasets_dir)], check=True)


if __name__ == "__main__":
    run_command(main)
