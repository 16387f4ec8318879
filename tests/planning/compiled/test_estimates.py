"""The estimated memory of a step against the accelerators' own compilers, where they are."""

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rungs.config.optimization_config import Remat
from tests.planning.compiled.test_targets import NEEDS_CUDA, NEEDS_TPU
from tests.support.committed_runs import ROOT
from tests.support.configs import model_config, train_config
from tests.support.plan_cases import FAMILIES

_SIZE = {"context_length": 2048, "emb_dim": 1024, "n_layers": 8, "n_heads": 8}
_LLAMA = {**_SIZE, "vocab_size": 32_768, "ffn_dim": 2816}
LARGE: dict[str, dict[str, Any]] = {
    "gpt2": {**_SIZE, "vocab_size": 50_257, "n_heads": 16, "tied_embeddings": True},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 512},
    "olmo": _LLAMA,
    "recipe": _LLAMA,
    "mixtral": {**_LLAMA, "ffn_dim": 1408},
    "gemma": {**_LLAMA, "sliding_window": 512, "head_dim": 256, "n_heads": 4, "n_kv_heads": 2},
    "a-to-a": {**_SIZE, "vocab_size": 32_768, "n_heads": None, "n_layers": 0},
}
"""Sizes of the families at which layers, logits and state all matter."""
_SHARDINGS = ("dp:8", "fsdp:8", "fsdp_tp:4x2")


class Case(NamedTuple):
    family: str
    remat: Remat
    sharding: str
    microbatches: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


def cases() -> Iterator[Case]:
    """Yield each family with each sharding and two settings of remat, with one microbatch and two
    in turns."""
    settings: tuple[Remat, ...] = "dots", "full"
    every = itertools.product(FAMILIES, settings, _SHARDINGS)
    for number, (family, remat, sharding) in enumerate(every):
        yield Case(family, remat, sharding, 1 + number % 2)


def check(
    case: Case, device: str, rows: int, folder: Path, **keys: Any
) -> tuple[dict[str, int], float]:
    """Compile a step with some sequences per device; check that the estimate is as near as it says.

    Args:
        keys: of model.json.

    Returns:
        The estimate by component, and the error that it states.
    """
    devices = int(case.sharding.partition(":")[2].partition("x")[0])
    model = model_config(**{**FAMILIES[case.family], **LARGE[case.family], **keys})
    train = train_config(
        dataset="shakespeare",
        microbatch_size=rows * devices,
        gradient_accumulation_steps=case.microbatches,
        remat=case.remat,
        clipping_max_norm=1.0,
    )
    (folder / "model.json").write_text(json.dumps(model.as_json()))
    (folder / "train.json").write_text(json.dumps(train.as_json()))
    content = compiled(folder, "--device", device, "--sharding", case.sharding)
    size, error = content["compiled"]["bytes_per_device"], content["memory_error"]
    print(f"{device} {case}: {size['estimate'] / size['total']:.3f} ± {error}")
    assert size["estimate"] == pytest.approx(size["total"], rel=error)
    return content["bytes_per_device"], error


def compiled(run: Path, *options: str) -> dict[str, Any]:
    """Return the plan of a run with its compiled step."""
    command = [sys.executable, "plan.py", str(run), *options, "--compile", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.long
@NEEDS_CUDA
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_estimates_for_gpus_are_as_near_as_they_say(case: Case, tmp_path: Path) -> None:
    _, error = check(case, "h100", rows=4, folder=tmp_path)
    assert error <= 0.1


@pytest.mark.long
@NEEDS_CUDA
@pytest.mark.parametrize("case", [c for c in cases() if c.family != "a-to-a"][::5], ids=str)
def test_estimates_are_as_near_as_they_say_where_a_layer_decides(
    case: Case, tmp_path: Path
) -> None:
    sizes, error = check(case, "h100", rows=4, folder=tmp_path, vocab_size=4096)
    assert sizes["layer"] > sizes["logits"]
    assert error <= 0.2


@pytest.mark.long
@NEEDS_TPU
@pytest.mark.parametrize("case", list(cases())[::5], ids=str)
def test_estimates_for_tpus_are_as_near_as_they_say(case: Case, tmp_path: Path) -> None:
    _, error = check(case, "tpu-v5e", rows=1, folder=tmp_path)
    assert error <= (0.25 if case.sharding == "dp:8" else 0.1)


@pytest.mark.long
@NEEDS_CUDA
@pytest.mark.parametrize("remat", ["activations", "dots"])
def test_a_large_microbatch_on_one_gpu_is_within_what_the_plan_says(
    remat: str, tmp_path: Path
) -> None:
    """`runs/gpt2-small`, whose layers are unrolled."""
    run = ROOT / "runs" / "gpt2-small"
    train = json.loads((run / "train.json").read_text()) | {"remat": remat}
    (tmp_path / "train.json").write_text(json.dumps(train))
    shutil.copy(run / "model.json", tmp_path)
    content = compiled(tmp_path, "--device", "h200")
    size, error = content["compiled"]["bytes_per_device"], content["memory_error"]
    assert error <= 0.2
    assert size["estimate"] == pytest.approx(size["total"], rel=error)
