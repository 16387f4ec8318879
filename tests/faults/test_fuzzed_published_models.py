"""Whatever a published model's folder contains, it is imported or reported in clear lines, and none
of its code is run."""

import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from rungs.common.errors import UserError
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.huggingface.tensor_reader import torch_bits, torch_specs
from tests.faults.fuzzing import (
    Fault,
    attempt,
    bad_bytes,
    bad_json,
    bad_weights,
    examples,
    in_place,
    put,
)
from tests.support.published_models import MODELS, arrays

FAMILIES = [
    "gemma3-vision",
    "gpt2",
    "llama",
    "llama-tied-llama3-scaling",
    "mixtral",
    "olmo3",
    "qwen2-sliding",
    "qwen3-moe-sliding",
    "smollm3",
]
CONFIGS = {name: json.loads((MODELS / name / "config.json").read_text()) for name in FAMILIES}
SHARDED = MODELS / "llama-sharded"
INDEX = "model.safetensors.index.json"


def check(folder: Path) -> Import:
    """Do all that an import does before it writes."""
    found = Import.from_source(find_source(str(folder)))
    assert found.summary()
    for name in found.match.names.values():
        found.tensors.bits(name)
    return found


def copy_model(name: str, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in MODELS.joinpath(name).glob("[cmt]*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@examples(30)
@given(data=st.data())
def test_any_config_json(name: str, data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        copy_model(name, folder)
    data.draw(in_place(bad_json(CONFIGS[name])))(folder / "config.json")
    attempt(lambda: check(folder), tmp_path, "config.json", str(folder))


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "llama", "smollm3", "olmo3"])
def test_a_config_of_very_many_layers_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    folder = copy_model(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**10}
    config.pop("layer_types", None)
    put(folder / "config.json", json.dumps(config).encode())
    assert isinstance(attempt(lambda: check(folder), tmp_path, "config.json"), UserError)


@examples(40)
@given(fault=in_place(bad_json(json.loads((SHARDED / INDEX).read_text()))))
def test_any_index(fault: Fault, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        copy_model("llama-sharded", folder)
    fault(folder / INDEX)
    attempt(lambda: check(folder), tmp_path, str(folder))


GPT2 = arrays(MODELS / "gpt2")


@examples(50)
@given(fault=in_place(bad_weights(save(GPT2, {"format": "pt"}))))
def test_any_safetensors_file(fault: Fault, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        copy_model("gpt2", folder)
    fault(folder / "model.safetensors")
    attempt(lambda: check(folder), tmp_path, str(folder))


# PyTorch files, whose pickles are assembled from opcodes


def word(text: str) -> bytes:
    return b"X" + len(text.encode()).to_bytes(4, "little") + text.encode()


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def tensor(key: str, offset: int, shape: list[int], strides: list[int]) -> bytes:
    storage = b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word(key) + word("cpu")
    sizes = [b"(" + b"".join(map(number, values)) + b"t" for values in (shape, strides)]
    reference = storage + number(6) + b"tQ"
    end = b"\x89ccollections\nOrderedDict\n)R" + b"tR"
    start = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return start + reference + number(offset) + b"".join(sizes) + end


def pickled(**tensors: bytes) -> bytes:
    items = b"".join(word(name) + value for name, value in tensors.items())
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u}b."


def archive(pickle: bytes, numbers: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("archive/data.pkl", pickle)
        made.writestr("archive/data/0", numbers)
    return file.getvalue()


NUMBERS = np.arange(6, dtype=np.float32)
MATRIX = tensor("0", 0, [2, 3], [3, 1])
VALID = archive(pickled(a=MATRIX, b=tensor("0", 3, [3], [1])), NUMBERS.tobytes())


def read(path: Path) -> dict[str, np.ndarray]:
    return {name: torch_bits(path, name) for name, _ in list(torch_specs(path))}


def test_an_assembled_pickle_is_read(tmp_path: Path) -> None:
    put(tmp_path / "model.bin", VALID)
    found = read(tmp_path / "model.bin")
    np.testing.assert_array_equal(found["a"].view(np.float32), NUMBERS.reshape(2, 3))
    np.testing.assert_array_equal(found["b"].view(np.float32), NUMBERS[3:])


@examples(100)
@given(fault=in_place(bad_bytes(VALID)))
def test_any_pytorch_file(fault: Fault, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    fault(path)
    attempt(lambda: read(path), tmp_path, "model.bin")


OPCODES = (
    *(bytes([code]) for code in b"(tRQus}])02b.N\x81\x85\x87\x88ea"),
    *(b"q\0", b"h\0", b"h\1", b"P0\n", b"I1\n", b"\x95" + b"\xff" * 8),
    *(b"X\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f"),  # lengths beyond the end
    *(b"cos\nsystem\n", b"c__builtin__\neval\n", b"i__builtin__\nexec\n"),
    *(b"ctorch\nFloatStorage\n", b"ccollections\nOrderedDict\n"),
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    *(word("a"), word("storage"), number(-1), number(2**70), MATRIX),
)
opcodes = st.sampled_from(OPCODES)


@examples(100)
@given(parts=st.lists(opcodes, max_size=12), is_complete=st.booleans())
def test_any_pickle(parts: list[bytes], is_complete: bool, tmp_path: Path) -> None:
    body = b"".join(parts)
    content = pickled(a=MATRIX)[:-1] + body + b"." if is_complete else b"\x80\x02" + body + b"."
    put(tmp_path / "model.bin", archive(content, NUMBERS.tobytes()))
    attempt(lambda: read(tmp_path / "model.bin"), tmp_path, "model.bin")


sizes = st.sampled_from([0, 1, 2, 3, 6, 7, -1, 2**31, 2**40, 2**62, 2**63, 2**70])


@examples(100)
@given(offset=sizes, axes=st.lists(st.tuples(sizes, sizes), max_size=3))
@example(offset=0, axes=[(2**40, 0)])
@example(offset=3, axes=[(2, -1)])
@example(offset=-1, axes=[(1, 1)])
@example(offset=0, axes=[(-1, 1)])
def test_any_shape_in_a_pytorch_file(
    offset: int, axes: list[tuple[int, int]], tmp_path: Path
) -> None:
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    content = pickled(a=tensor("0", offset, shape, strides))
    put(tmp_path / "model.bin", archive(content, NUMBERS.tobytes()))
    found = attempt(lambda: read(tmp_path / "model.bin"), tmp_path, "model.bin")
    if not isinstance(found, UserError):
        assert list(found["a"].shape) == shape
        assert found["a"].size <= NUMBERS.size
        assert min([offset, *shape, *strides]) >= 0


@pytest.mark.parametrize("key", ["../data.pkl", "/etc/passwd", "", "1"])
def test_a_storage_must_be_an_entry_of_its_file(key: str, tmp_path: Path) -> None:
    content = pickled(a=tensor(key, 0, [1], [1]))
    put(tmp_path / "model.bin", archive(content, NUMBERS.tobytes()))
    outcome = attempt(lambda: read(tmp_path / "model.bin"), tmp_path, "model.bin")
    assert isinstance(outcome, UserError)


def test_a_compressed_entry_is_not_unpacked(tmp_path: Path) -> None:
    bomb = archive(pickled(a=tensor("0", 0, [1], [1])), bytes(200 << 20), zipfile.ZIP_DEFLATED)
    put(tmp_path / "model.bin", bomb)
    outcome = attempt(lambda: read(tmp_path / "model.bin"), tmp_path, "model.bin")
    assert isinstance(outcome, UserError)
    assert "not stored the way PyTorch does" in str(outcome)


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_no_pickle_is_run(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "run by a pickle"
    content = pickle.dumps({"a": _Attack(mark)}, protocol)
    put(tmp_path / "model.bin", archive(content, NUMBERS.tobytes()))
    outcome = attempt(lambda: read(tmp_path / "model.bin"), tmp_path, "model.bin")
    assert isinstance(outcome, UserError)
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists()  # the attack works on an unpickler


def test_code_beside_a_model_is_not_copied_or_run(tmp_path: Path) -> None:
    folder = copy_model("gpt2", tmp_path / "model")
    for name in ("modeling_gpt2.py", "configuration.py", "setup.py", "__init__.py"):
        (folder / name).write_text("raise SystemExit('executed')")
    import_model(check(folder), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.py"))
    config = CONFIGS["gpt2"] | {"auto_map": {"AutoModel": "modeling_gpt2.Evil"}}
    put(folder / "config.json", json.dumps(config).encode())
    outcome = attempt(lambda: check(folder), tmp_path, "config.json")
    assert isinstance(outcome, UserError)
