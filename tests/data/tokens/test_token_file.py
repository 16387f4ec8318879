"""Token files: reading what was written, errors in damaged files, and memory use."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rungs.common.errors import UserError
from rungs.data.tokens import token_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.safetensors"


@pytest.mark.parametrize("code", ["U8", "U16", "U32", "I32", "I64"])
def test_safetensors_and_we_read_the_written_tokens(path: Path, code: str) -> None:
    with token_file.TokenWriter(path, code) as writer:
        writer.append([3, 1])
        writer.append([])
        writer.append(range(100))
    expected = np.array([3, 1, *range(100)], token_file.DTYPES[code])
    for tokens in (load_file(path)["tokens"], token_file.TokenFile(path).tokens[:]):
        np.testing.assert_array_equal(tokens, expected)
        assert tokens.dtype == expected.dtype


def test_safetensors_and_we_read_the_written_pairs(path: Path) -> None:
    with token_file.PairWriter(path, "U16") as writer:
        writer.append_pair([3, 1], [9])
        writer.append_pair([], [4, 4, 9])
        writer.append_pair([7], [9])
    assert (writer.tokens, writer.pairs) == (8, 3)
    loaded, bounds = load_file(path), token_file.TokenFile(path).bounds
    assert bounds is not None
    np.testing.assert_array_equal(loaded["pair_bounds"], [[2, 3], [3, 6], [7, 8]])
    np.testing.assert_array_equal(bounds[:], loaded["pair_bounds"])
    np.testing.assert_array_equal(token_file.TokenFile(path).tokens[:], [3, 1, 9, 4, 4, 9, 7, 9])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_file_format_has_not_changed(path: Path) -> None:
    """A run checks its tokens' checksum, also if the dataset was built again."""
    with token_file.TokenWriter(path, "U16") as writer:
        writer.append([3, 1])
    header = b'{"tokens": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}'
    assert path.read_bytes() == (120).to_bytes(8, "little") + header.ljust(120) + b"\3\0\1\0"


def test_slices_are_plain_read_only_arrays(path: Path) -> None:
    save_file({"tokens": np.arange(100, dtype=np.uint16), "a": np.ones(3)}, path)
    tokens = token_file.TokenFile(path).tokens
    assert len(tokens) == 100
    np.testing.assert_array_equal(tokens[7:12], [7, 8, 9, 10, 11])
    np.testing.assert_array_equal(tokens[97:200], [97, 98, 99])
    assert len(tokens[5:5]) == 0
    with pytest.raises(ValueError, match="read-only"):
        tokens[:3][0] = 1


def test_a_failed_write_leaves_no_valid_file(path: Path) -> None:
    with pytest.raises(OverflowError), token_file.TokenWriter(path, "U16") as writer:
        writer.append([*range(1000), 65_536])
    with pytest.raises(UserError, match="not a complete safetensors file"):
        token_file.TokenFile(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"token": np.arange(3)}, "has no tensor 'tokens' .its tensors: token."),
        ({"tokens": np.ones((2, 3), np.uint16)}, r"U16 and shape \[2, 3\]; .* one dimension"),
        ({"tokens": np.array(3, np.uint16)}, r"shape \[\]; .* one dimension"),
        ({"tokens": np.ones(3, np.float32)}, "has dtype F32 .* integer dtype"),
        ({"tokens": np.ones(0, np.uint16)}, "is empty"),
        ({"tokens": np.arange(3), "pair_bounds": np.ones((2, 3), np.int64)}, r"shape \['n', 2\]"),
        (
            {"tokens": np.arange(3), "pair_bounds": np.ones(2, np.int64)},
            r"has dtype I64 and shape \[2",
        ),
        ({"tokens": np.arange(3), "pair_bounds": np.ones((0, 2), np.int64)}, r"shape \[0, 2\]"),
        ({"tokens": np.arange(3), "pair_bounds": np.ones((2, 2), np.int32)}, "has dtype I32"),
        ({"tokens": np.arange(3), "chat_ends": np.ones((2, 2), np.int64)}, r"shape \['n'\]"),
    ],
)
def test_wrong_tensors_are_reported(
    path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    save_file(tensors, path)
    with pytest.raises(UserError, match=message) as caught:
        token_file.TokenFile(path)
    assert str(path) in str(caught.value)


def test_incomplete_files_are_reported(path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        token_file.TokenFile(path)
    save_file({"tokens": np.arange(1000, dtype=np.uint16)}, path)
    content = path.read_bytes()
    for size in (0, 5, 60, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match="not a complete safetensors file"):
            token_file.TokenFile(path)
    path.write_bytes(content.replace(b"1000", b"9999"))
    with pytest.raises(UserError, match="not a complete safetensors file"):
        token_file.TokenFile(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="not a complete safetensors file"):
        token_file.TokenFile(path)
