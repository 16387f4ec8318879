"""Whatever a dataset's files contain, it is read correctly or reported in clear lines."""

import io
import shutil
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data.build import pair_dataset, text_dataset, tokens_dataset
from rungs.data.catalog import build_dataset, open_dataset
from rungs.data.text.tokenizer import train_bpe
from rungs.data.tokens.dataset import DESCRIPTION_FILE, Dataset
from rungs.data.tokens.loader import TrainingData
from tests.faults.fuzzing import (
    Fault,
    absent,
    assert_clear,
    attempt,
    bad_bytes,
    bad_json,
    bad_weights,
    deadline,
    examples,
    in_place,
)
from tests.support.configs import model_config, train_config

TOKENS = np.arange(40, dtype=np.uint16) % 16
BOUNDS = np.array([[2, 5], [5, 9], [20, 40]], np.int64)
TEXT = save({"tokens": TOKENS})
PAIRS = save({"tokens": TOKENS, "pair_bounds": BOUNDS})
MODEL = model_config(vocab_size=16)
LINES = b'{"prompt": "a b", "answer": "c"}\n{"prompt": "", "answer": "d"}\n' * 4


def make(datasets_dir: Path, content: bytes) -> Path:
    """Make a dataset's folder, without a description yet."""
    folder = datasets_dir / "tiny"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "train.safetensors").write_bytes(content)
    (folder / "validation.safetensors").write_bytes(content)
    return folder


def use(datasets_dir: Path) -> Dataset:
    """Open a dataset and read its first steps, as a start does."""
    found = open_dataset("tiny", str(datasets_dir))
    length = 31 if found.holds_pairs else 8
    train = train_config(dataset="tiny", sequence_length=length, microbatch_size=1)
    model = MODEL.model_copy(update={"context_length": 31})
    try:
        data = TrainingData(RunConfig(model, train), {"tiny": found})
    except UserError as error:
        raise UserError("\n".join(f"tiny: {line}" for line in str(error).split("\n"))) from None
    for step in range(min(data.total_steps, 3)):
        batch = data.batch(step)
        assert batch.inputs_ABS.min() >= 0
        assert max(batch.inputs_ABS.max(), batch.targets_ABS.max()) < model.vocab_size
    return found


@examples(100)
@given(fault=in_place(bad_weights(TEXT)) | in_place(bad_weights(PAIRS)))
def test_any_token_file(fault: Fault, tmp_path: Path) -> None:
    fault(make(tmp_path, TEXT) / "train.safetensors")
    attempt(lambda: use(tmp_path), tmp_path, "tiny", may_change=(DESCRIPTION_FILE,))


bounds = st.sampled_from([-(2**63), -1, 0, 1, 2, 5, 9, 20, 39, 40, 41, 2**62, 2**63 - 1])


@examples(40)
@given(rows=st.lists(st.tuples(bounds, bounds), min_size=1, max_size=4))
def test_any_pair_bounds(rows: list[tuple[int, int]], tmp_path: Path) -> None:
    content = save({"tokens": TOKENS, "pair_bounds": np.array(rows, np.int64)})
    (make(tmp_path, PAIRS) / "train.safetensors").write_bytes(content)
    attempt(lambda: use(tmp_path), tmp_path, "tiny", may_change=(DESCRIPTION_FILE,))


@examples(25)
@given(dtype=st.sampled_from(["<u1", "<u4", "<i8", "<u8", "<f4"]), data=st.data())
def test_tokens_of_any_dtype(dtype: str, data: st.DataObject, tmp_path: Path) -> None:
    numbers = data.draw(st.lists(st.sampled_from([0, 1, 15, 16, 127]), min_size=1, max_size=30))
    if dtype in ("<i8", "<u8"):
        numbers += data.draw(st.lists(st.sampled_from([0, 2**31, 2**63 - 1]), max_size=2))
    if dtype == "<i8":
        numbers += data.draw(st.lists(st.sampled_from([-1, -(2**63)]), max_size=1))
    content = save({"tokens": np.array(numbers, dtype)})
    (make(tmp_path, TEXT) / "train.safetensors").write_bytes(content)
    attempt(lambda: use(tmp_path), tmp_path, "tiny", may_change=(DESCRIPTION_FILE,))


LLM_C = np.array([20240520, 1, len(TOKENS), *253 * [0]], "<i4").tobytes() + TOKENS.tobytes()
NPY = io.BytesIO()
np.save(NPY, TOKENS.astype(">i8"))
FOREIGN = {"a.bin": LLM_C, "a.npy": NPY.getvalue(), "a.safetensors": TEXT}


@examples(40)
@given(data=st.data(), percent=st.sampled_from([0.0, 10.0]))
def test_any_tokens_of_another_program(data: st.DataObject, percent: float, tmp_path: Path) -> None:
    """The dataset is made completely or not at all."""
    name = data.draw(st.sampled_from(sorted(FOREIGN)))
    datasets_dir, source = tmp_path / "datasets", tmp_path / name
    for path in (datasets_dir, *map(tmp_path.joinpath, FOREIGN)):
        absent(path)
    datasets_dir.mkdir()
    is_ours = name == "a.safetensors"
    data.draw(in_place((bad_weights if is_ours else bad_bytes)(FOREIGN[name])))(source)
    build = partial(
        tokens_dataset.build, validation_files=[], vocabulary=16, validation_percent=percent
    )
    before = {path: path.lstat().st_mode for path in tmp_path.iterdir()}
    try:
        with deadline():
            found = build_dataset("new", [source], datasets_dir, build)
        assert found.description.splits["train"].largest_token_id < 16
    except UserError as error:
        assert_clear(str(error), ("a.", "there are no tokens"))
        assert not (datasets_dir / "new").exists()
    assert {path: path.lstat().st_mode for path in tmp_path.iterdir()} == before


TOKENIZER = train_bpe(["a b c d"], 257)
sources = st.one_of(bad_bytes(LINES), bad_json({"prompt": "a", "answer": "b"}))


@examples(40)
@given(fault=in_place(sources), of_pairs=st.booleans(), percent=st.sampled_from([0.0, 10.0]))
def test_any_source_of_a_dataset(
    fault: Fault, of_pairs: bool, percent: float, tmp_path: Path
) -> None:
    """The dataset is made completely or not at all."""
    datasets_dir, source = tmp_path / "datasets", tmp_path / "source.jsonl"
    shutil.rmtree(datasets_dir, ignore_errors=True)
    datasets_dir.mkdir()
    fault(source)
    module = pair_dataset if of_pairs else text_dataset
    build = partial(module.build, tokenizer=TOKENIZER, validation_percent=percent)
    before = {path: path.lstat().st_mode for path in tmp_path.iterdir()}
    try:
        with deadline():
            found = build_dataset("new", [source], datasets_dir, build)
        assert found.description.splits["train"].tokens
    except UserError as error:
        assert_clear(str(error))
        assert not (datasets_dir / "new").exists()
    assert {path: path.lstat().st_mode for path in tmp_path.iterdir()} == before
