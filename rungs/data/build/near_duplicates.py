"""The builder of a dataset without near-duplicates: documents of another dataset that are much like
an earlier one. Two are compared by the share of their runs of `WORDS` words that both have (Jaccard
similarity), estimated from MinHash sketches (Broder 1997) by Rensa."""

import json
from pathlib import Path
from typing import Any

from rungs.common import run_log
from rungs.common.errors import UserError, reason
from rungs.common.shown_text import install_line
from rungs.data import overlap
from rungs.data.text.tokenizer_files import load_tokenizer, save_tokenizer
from rungs.data.tokens.dataset import Dataset, NearDuplicates, Source, split_file
from rungs.data.tokens.token_file import TokenWriter

WORDS = 5
FILE = "near_duplicates.jsonl"
_SKETCH = {"num_perm": 128, "seed": 42}
_BANDS = 32
"""Parts of a sketch of which one must be equal in documents to compare. With a similarity of 0.7
99.99% have one, with 0.5 87%."""


def build(folder: Path, datasets: list[Dataset], similarity: float) -> Source:
    """Write the token files and the tokenizer of a dataset, without each document of another one
    that has at least this similarity to one before it; `FILE` says which, and which were kept.
    Validation is read first, so no training document is near one of it. Raises UserError if the
    other dataset holds pairs, its tokenizer has no end-of-text token, or Rensa isn't installed."""
    try:
        from rensa import RMinHash, RMinHashDeduplicator  # type: ignore[import-untyped]
    except ImportError as error:
        problem = f"Rensa is not installed ({reason(error)}): {install_line('near-duplicates')}"
        raise UserError(problem) from None
    [dataset] = datasets
    if dataset.holds_pairs:
        raise UserError(f"dataset {dataset.name}: holds pairs; --near-duplicates is for texts")
    tokenizer = load_tokenizer(dataset.folder)
    end: Any = tokenizer.end_of_text  # `documents_of` refuses none
    seen = RMinHashDeduplicator(similarity, use_lsh=True, num_bands=_BANDS, **_SKETCH)
    read = left_out = 0
    size = sum(split.tokens for split in dataset.description.splits.values())
    with (folder / FILE).open("w") as record, run_log.byte_progress("comparing", size) as bar:
        for split in reversed(dataset.splits):
            tokens, texts = (file := dataset.open(split)).tokens, file.texts
            dtype = f"{tokens.dtype.kind.upper()}{8 * tokens.dtype.itemsize}"
            with TokenWriter(folder / split_file(split), dtype, texts) as writer:
                for number, (ids, text) in enumerate(overlap.documents_of(dataset, split)):
                    name, words = f"{split} {number}", overlap.words_of(text)
                    runs = range(max(len(words) - WORDS + 1, 1))
                    sketch = RMinHash(**_SKETCH)
                    sketch.update([" ".join(words[run : run + WORDS]) for run in runs])
                    if kept := seen.get_duplicates(sketch):
                        record.write(json.dumps({"left_out": name, "kept": sorted(kept)}) + "\n")
                    else:
                        seen.add(name, sketch)
                        writer.append([*ids, end])
                    read, left_out = read + 1, left_out + bool(kept)
                    bar.update(len(ids) + 1)
    save_tokenizer(tokenizer, folder)
    of, counts = dataset.description.checksums, {"documents": read, "left_out": left_out}
    found = NearDuplicates(of=of, similarity=similarity, **counts)
    return Source(kind="near-duplicates", files=[dataset.name], near_duplicates=found)
