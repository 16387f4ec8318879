"""Datasets from token files of other programs: the same tokens from every format, and what is
refused."""

import itertools
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rungs.common.errors import UserError
from rungs.data.build import tokens_dataset
from rungs.data.build.tokens_dataset import TokenSection
from rungs.data.catalog import build_dataset
from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.tokens.dataset import Dataset
from tests.faults.fuzzing import limited_memory, snapshot
from tests.support.commands import Finished, run_script

VOCAB = 50_257
IDS = np.random.default_rng(0).integers(0, VOCAB, 5_000)
IDS[:3] = (0, VOCAB - 1, 258)


def llm_c(ids: np.ndarray, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> bytes:
    """Return a file as llm.c's `write_datafile` writes it on a little-endian machine."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    return header.tobytes() + ids.astype(dtype).tobytes()


Make = Callable[[Path], object]
"""Creates a file."""


def npy(array: np.ndarray) -> Make:
    return lambda path: np.save(path, array)


def content(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


def tensors(**arrays: np.ndarray) -> Make:
    return lambda path: save_file(arrays, path)


def with_texts(ids: np.ndarray, texts: str) -> Make:
    return lambda path: save_file({"tokens": ids.astype(np.uint16)}, path, {"texts": texts})


FORMATS: dict[str, Make] = {
    **{f"{kind}.npy": npy(IDS.astype(kind)) for kind in ("<u2", ">u4", "<i4", ">i8", "<u8")},
    "nanogpt.bin": content(IDS.astype("<u2").tobytes()),
    "llm-c.bin": content(llm_c(IDS)),
    "llama-3.bin": content(llm_c(IDS, 20240801, 7, "<u4")),
    "ours.safetensors": tensors(tokens=IDS.astype(np.uint16)),
    "only.safetensors": tensors(input_ids=IDS),
    "other.safetensors": tensors(tokens=IDS.astype(np.int32), a=np.ones(3, np.float32)),
}


def build(
    place: Path,
    *files: Path,
    validation: tuple[Path, ...] = (),
    vocabulary: Tokenizer | int = VOCAB,
    percent: float = 0,
    name: str = "mine",
    dtype: str | None = None,
) -> Dataset:
    build = partial(
        tokens_dataset.build,
        validation_files=[*validation],
        vocabulary=vocabulary,
        validation_percent=percent,
        dtype=dtype,
    )
    return build_dataset(name, [*files], place / "datasets", build)


def write(folder: Path, name: str, ids: np.ndarray = IDS) -> Path:
    path = folder / name
    content(ids.astype("<u2").tobytes())(path)
    return path


def tokens_of(dataset: Dataset) -> dict[str, list[int]]:
    return {split: dataset.tokens(split)[:].tolist() for split in dataset.splits}


@pytest.mark.parametrize("percent", [0, 10])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, percent: float
) -> None:
    monkeypatch.setattr(tokens_dataset, "_BLOCK_TOKENS", 777)
    path = tmp_path / name
    FORMATS[name](path)
    dataset = build(tmp_path, path, percent=percent)
    cut = 4500 if percent else 5000
    parts = {"train": IDS[:cut].tolist(), "validation": IDS[cut:].tolist()}
    assert tokens_of(dataset) == {split: tokens for split, tokens in parts.items() if tokens}
    described = dataset.description.splits["train"]
    assert described.largest_token_id == VOCAB - 1
    assert dataset.description.source.kind == "tokens"
    assert dataset.description.source.files == [name]
    assert described.dtype == "uint16"
    assert dataset.tokenizer_file is None


def test_one_byte_tokens_and_large_vocabularies(tmp_path: Path) -> None:
    small, large = tmp_path / "SMALL.NPY", tmp_path / "large.npy"
    np.save(small.open("wb"), (np.arange(200) % 100).astype(np.int8))
    np.save(large, np.array([0, 65_536, 128_255]))
    dataset = build(tmp_path, small, vocabulary=100)
    assert tokens_of(dataset)["train"] == [n % 100 for n in range(200)]
    dataset = build(tmp_path, large, vocabulary=128_256, name="large")
    assert tokens_of(dataset)["train"] == [0, 65_536, 128_255]
    assert dataset.tokens("train").dtype == np.uint32


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "uint64"])
@pytest.mark.parametrize(
    ("vocab_size", "problem"),
    [(VOCAB, "every second number is 0"), (200_000, "no ids over 65,535")],
)
def test_numbers_without_a_header_need_their_type(
    tmp_path: Path, dtype: str, vocab_size: int, problem: str
) -> None:
    path, ids = tmp_path / "raw.bin", IDS * (vocab_size // VOCAB)
    content(ids.astype(dtype).tobytes())(path)
    with pytest.raises(UserError, match=problem):
        build(tmp_path, path, vocabulary=vocab_size)
    dataset = build(tmp_path, path, vocabulary=vocab_size, dtype=dtype)
    assert tokens_of(dataset)["train"] == ids.tolist()


@pytest.mark.parametrize("said", ["uint32", "int32"])
def test_a_type_that_is_too_narrow_is_refused(tmp_path: Path, said: str) -> None:
    content(IDS.astype("<i8").tobytes())(tmp_path / "raw.bin")
    with pytest.raises(UserError, match=f"as {said} every second number is 0"):
        build(tmp_path, tmp_path / "raw.bin", dtype=said)


@pytest.mark.parametrize("name", ["raw.bin", "wrapped.npy", "wrapped.safetensors"])
def test_ids_that_may_have_been_cut_off_are_refused_until_confirmed(
    tmp_path: Path, name: str
) -> None:
    path, wrapped = tmp_path / name, (IDS * 2).astype(np.uint16)
    {"bin": content(wrapped.tobytes()), "npy": npy(wrapped)}.get(
        name[-3:], tensors(tokens=wrapped)
    )(path)
    with pytest.raises(UserError, match=r"as uint16 it has no ids over 65,535, .* 100,000 tokens"):
        build(tmp_path, path, vocabulary=100_000)
    dataset = build(tmp_path, path, vocabulary=100_000, dtype="uint16")
    assert tokens_of(dataset)["train"] == wrapped.tolist()


def test_what_is_said_must_fit_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, IDS.astype(np.int32))
    with pytest.raises(UserError, match="holds int32, not the uint32 of --token-dtype"):
        build(tmp_path, path, dtype="uint32")


def test_files_for_validation_are_not_split(tmp_path: Path) -> None:
    train, val = write(tmp_path, "train.bin"), write(tmp_path, "val.bin", IDS[:70])
    more = write(tmp_path, "val2.bin", IDS[70:90])
    dataset = build(tmp_path, train, validation=(val, more), percent=5)
    assert tokens_of(dataset) == {"train": IDS.tolist(), "validation": IDS[:90].tolist()}
    assert dataset.description.source.files == ["train.bin", "val.bin", "val2.bin"]


def test_shards_are_joined_and_split_by_file(tmp_path: Path) -> None:
    parts = np.array_split(IDS, 20)
    paths = [write(tmp_path, f"shard-{n:02}.bin", part) for n, part in enumerate(parts)]
    found = tokens_of(build(tmp_path, *paths, percent=10))
    held_out = [part.tolist() for part in np.split(np.array(found["validation"]), 2)]
    kept = [part.tolist() for part in parts if part.tolist() not in held_out]
    assert len(kept) == 18
    assert found["train"] == [*itertools.chain(*kept)]
    assert tokens_of(build(tmp_path, *paths, name="all"))["train"] == IDS.tolist()


def test_what_a_file_says_of_texts_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "begun.safetensors"
    with_texts(IDS % 300, '{"begin":[400],"end":2}')(path)
    dataset = build(tmp_path, path, percent=40)
    assert dataset.begin == [400]
    assert dataset.description.splits["train"].largest_token_id == 400


def test_texts_begin_as_the_tokenizers_do_if_the_file_does(tmp_path: Path) -> None:
    tokenizer = train_bpe(["some text"], 257)
    tokenizer.begin = [3]
    for first, begin in ((3, [3]), (4, [])):
        path = write(tmp_path, f"{first}.bin", np.array([first, 4, 5, 6]))
        dataset = build(tmp_path, path, vocabulary=tokenizer, name=f"begins-{first}")
        assert dataset.begin == begin
        assert dataset.tokenizer_file is not None


def test_a_file_larger_than_memory_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(160 << 20)
    with limited_memory(64 << 20):
        dataset = build(tmp_path, path)
    assert dataset.description.splits["train"].tokens == 80 << 20


# What is refused


class Payload:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


HEADER = llm_c(IDS)[:1024]
REFUSED: dict[str, tuple[str, Make, str]] = {
    "odd": ("a.bin", content(b"\1\2\3"), "has 3 bytes, which is no whole number of uint16"),
    "empty": ("a.bin", content(b""), "has no tokens"),
    "empty array": ("a.npy", npy(np.zeros(0, np.uint16)), "has no tokens"),
    "two dimensions": ("a.npy", npy(np.zeros((2, 3), np.uint16)), "has shape [2, 3]"),
    "floats": ("a.npy", npy(np.zeros(3)), "has dtype float64; it must be an integer dtype"),
    "objects": (
        "a.npy",
        lambda path: np.save(path, np.array([Payload()], object), allow_pickle=True),
        "has dtype object",
    ),
    "a pickle": ("a.npy", lambda path: path.write_bytes(pickle.dumps(Payload())), "not a complete"),
    "cut array": (
        "a.npy",
        lambda path: [make(path) for make in (npy(IDS), lambda p: os.truncate(p, 20_000))],
        "has 20,000 bytes, but should have 40,128 with the 5,000 tokens",
    ),
    "cut tokens": ("a.bin", content(llm_c(IDS)[:-2]), "has 11,022 bytes, but should have 11,024"),
    "negative count": (
        "a.bin",
        content(np.array([20240520, 1, -5] + 253 * [0], "<i4").tobytes()),
        "has no tokens",
    ),
    "another version": ("a.bin", content(llm_c(IDS, version=2)), "20240520 and version 2; tokens"),
    "another magic": ("a.bin", content(llm_c(IDS, 20240326, 3)), "20240326 and version 3; tokens"),
    "big-endian header": (
        "a.bin",
        content(np.frombuffer(llm_c(IDS)[:1024], "<i4").byteswap().tobytes()),
        "its header is big-endian",
    ),
    "big-endian tokens": (
        "a.bin",
        content(np.full(9, 258 + 1, ">u2").astype(">u2").tobytes() + b"\xc5\x00"),
        "but the vocabulary has 300",
    ),
    "outside": (
        "a.npy",
        npy(np.array([1, 299, 300])),
        "token 2 has the id 300, but the vocabulary",
    ),
    "negative": ("a.npy", npy(np.array([1, -1])), "token 1 has the id -1"),
    "no suffix": ("tokens", content(b"\0\0"), "its name must end in .npy, .bin or .safetensors"),
    "missing": ("a.bin", lambda _: None, "cannot be read: No such file"),
    "not safetensors": ("a.safetensors", content(b"abc"), "not a complete safetensors file"),
    "float tensor": ("a.safetensors", tensors(tokens=np.zeros(3, np.float32)), "has dtype F32"),
    "which tensor": ("a.safetensors", tensors(a=IDS, b=IDS), "has 2 tensors, of which none"),
    "negative last token": (
        "a.safetensors",
        with_texts(IDS % 300, '{"begin":[3],"end":-1}'),
        "its metadata doesn't say what begins and ends texts",
    ),
    "ours but outside": ("a.safetensors", tensors(tokens=IDS), "but the vocabulary has 300"),
    "pairs": (
        "a.safetensors",
        tensors(tokens=IDS, pair_bounds=np.array([[1, 5_000]])),
        "holds pairs or chats, not a text",
    ),
}


def download(place: Path, *options: object) -> Finished:
    return run_script("download_dataset.py", "--tokens", *options, "--datasets-dir", place / "d")


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_file_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    name, make, message = REFUSED[case]
    make(tmp_path / name)
    good = write(tmp_path, "good.bin", IDS % 300)
    before = snapshot(tmp_path)
    finished = download(
        tmp_path, good, "--validation-file", name, "--name", "x", "--vocab-size", 300
    )
    assert finished.returncode == 2
    (line,) = finished.stderr.strip().splitlines()
    assert line.startswith(f"error: {name}: ")
    assert message in line
    assert finished.stdout == ""
    assert snapshot(tmp_path) == before


def test_any_length_of_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    for name in ("llm-c.bin", "llama-3.bin", "<u2.npy", "ours.safetensors"):
        path = tmp_path / name
        FORMATS[name](path)
        size = path.stat().st_size
        for shorter in (size - 1, size - 2, size // 2, 1500, 1023, 700, 100, 9):
            os.truncate(path, min(shorter, path.stat().st_size))
            with pytest.raises(UserError):
                TokenSection.of_file(path)


def test_a_split_without_tokens_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.bin", IDS[:9])
    for percent in (1, 99):
        with pytest.raises(
            UserError, match=r"there are no tokens for the (train|validation) split"
        ):
            build(tmp_path, path, percent=percent)
    assert list((tmp_path / "datasets").iterdir()) == []


def test_the_command_prints_what_is_there(tmp_path: Path) -> None:
    train_bpe(["some text"], 300).save(tmp_path / "tokenizer.json")
    train, val = write(tmp_path, "train.bin", IDS % 256), write(tmp_path, "val.bin", IDS[:50] % 256)
    finished = download(
        *(tmp_path, train, "--validation-file", val, "--name", "x"),
        *("--tokenizer", tmp_path / "tokenizer.json"),
    )
    assert finished.returncode == 0, finished.stderr
    assert "train: 5,000 tokens, largest id 255, 10,128 bytes of uint16" in finished.stdout
    assert "validation: 50 tokens" in finished.stdout
    assert "tokenizer: vocab_size" in finished.stdout
    again = download(tmp_path, train, "--name", "x", "--vocab-size", 300)
    assert again.returncode == 2
    assert "already exists; choose another name" in again.stderr
    assert load_file(tmp_path / "d/x/train.safetensors")["tokens"].dtype == np.uint16
