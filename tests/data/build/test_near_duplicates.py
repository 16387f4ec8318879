"""Near-duplicates are left out as exact similarities of all pairs of documents say."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.data.build import near_duplicates
from rungs.data.build.near_duplicates import FILE
from rungs.data.catalog import build_dataset
from rungs.data.overlap import texts_of
from rungs.data.tokens.dataset import Dataset
from tests.data.test_overlap import TOKENIZER, make_dataset
from tests.support.commands import run_script
from tests.support.tiny_run import make_pairs

LEAST = 0.75
RNG = np.random.default_rng(7)
BASES = [[f"w{n:x}" for n in RNG.integers(0, 1 << 40, 150)] for _ in range(12)]


def with_changes(words: list[str], count: int) -> str:
    changed = list(words)
    for place in RNG.choice(len(words), count, replace=False):
        changed[place] = f"x{RNG.integers(1 << 40):x}"
    return " ".join(changed)


VALIDATION = [with_changes(BASES[number], count) for number, count in enumerate([0, 1, 0])]
TRAIN = [
    *(with_changes(words, count) for words in BASES for count in (0, 1, 20)),
    " ".join(BASES[5]).upper().replace(" ", ", ", 30),
    *("a few words", "A few words.", "others", "", "..."),
    *(with_changes(words, count) for words in BASES[:6] for count in (2, 9)),
]
SPLITS = {"validation": VALIDATION, "train": TRAIN}


def similarity(text: str, other: str) -> float:
    """Of two texts: the size of the intersection of their runs of 5 words by that of the union."""
    runs = []
    for each in (text, other):
        words = re.sub(r"[^\w\s]", "", each.lower()).split()
        runs.append({tuple(words[at : at + 5]) for at in range(max(len(words) - 4, 1))})
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


def expected() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return what is kept of each split, and for each document left out which kept ones it is
    near."""
    kept, near = dict[str, str](), dict[str, list[str]]()
    for split, texts in SPLITS.items():
        for number, text in enumerate(filter(None, texts)):
            found = [name for name, other in kept.items() if similarity(text, other) >= LEAST]
            if found:
                near[f"{split} {number}"] = sorted(found)
            else:
                kept[f"{split} {number}"] = text
    by_split = {
        split: [text for name, text in kept.items() if name.startswith(split)] for split in SPLITS
    }
    return by_split, near


@pytest.fixture
def datasets_dir(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "d", TRAIN, VALIDATION)
    return tmp_path


def test_what_is_near_an_earlier_document_is_left_out(datasets_dir: Path) -> None:
    finished = run_script(
        *("download_dataset.py", "d", "--near-duplicates", LEAST, "--name", "clean"),
        *("--datasets-dir", datasets_dir),
    )
    assert finished.returncode == 0, finished.stderr
    kept, near = expected()
    assert len(near) > 20
    clean = Dataset("clean", datasets_dir / "clean")
    assert {split: [*texts_of(clean, split)] for split in clean.splits} == kept
    lines = [json.loads(line) for line in (clean.folder / FILE).read_text().splitlines()]
    assert {line["left_out"]: line["kept"] for line in lines} == near
    assert len(lines) == len(near)
    ends = clean.tokens("train")[:] == TOKENIZER.end_of_text
    assert ends.sum() == len(kept["train"])
    found = clean.description.source.near_duplicates
    assert found is not None
    read = sum(len([*filter(None, texts)]) for texts in SPLITS.values())
    assert (found.documents, found.left_out, found.similarity) == (read, len(near), LEAST)
    assert found.of == Dataset("d", datasets_dir / "d").description.checksums
    assert f"{len(near)} of {read} documents left out: with a similarity of 0.75" in finished.stdout


def test_nothing_is_written_without_rensa_or_for_pairs(
    datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out = partial(near_duplicates.build, similarity=LEAST)
    make_pairs(datasets_dir)
    pairs, texts = (Dataset(name, datasets_dir / name) for name in ("pairs", "d"))
    with pytest.raises(UserError, match="dataset pairs: holds pairs"):
        build_dataset("clean", [pairs], datasets_dir, leave_out)
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError, match=r"Rensa is not installed .* --extra near-duplicates"):
        build_dataset("clean", [texts], datasets_dir, leave_out)
    assert not (datasets_dir / "clean").exists()
