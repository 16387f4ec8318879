"""A plan that shows what a compiler says of the step."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rungs.cli import plan
from rungs.planning.compiled import step as compiled_step
from rungs.planning.compiled.collectives import Traffic
from rungs.planning.compiled.step import Compiled, CompiledStep, Kernels
from tests.support.committed_runs import ROOT

pytestmark = pytest.mark.usefixtures("shared_traces")

GB = 10**9
SENT = Traffic("all-gather", ("data",), 18, 3 * GB, 2 * GB)
PROGRAM = """
ENTRY %main {
  %x = bf16[1000,1000]{1,0} parameter(0)
  ROOT %y = bf16[1000,1000]{1,0} tanh(%x), metadata={op_name="jit(train_step)/experts/tanh"}
}
"""
KERNELS = Kernels({"attention": {"cuDNN": 3}}, 2, ["fusion_3"])


def planned(monkeypatch: pytest.MonkeyPatch, result: Any, *options: str) -> tuple[int, str]:
    """Return exit code and output of a plan whose compiler answers with `result`."""
    step = CompiledStep(61.0, {"jax": "0.10.2"}, result)
    monkeypatch.setattr(compiled_step, "compile_apart", lambda *_: step)
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else "false")
    arguments = [str(ROOT / "runs/mixtral"), "--device", "h100", "--sharding", "fsdp:8"]
    found = CliRunner().invoke(plan.main, [*arguments, "--compile", *options])
    return found.exit_code, found.output


def test_the_compilers_figures_stand_next_to_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = planned(monkeypatch, Compiled(4 * GB, 16 * GB, [SENT], "", KERNELS, PROGRAM))
    assert code == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "compiled in 1 min 01 s by jax 0.10.2; nothing was run" in lines
    assert any(line.endswith("4.00 GB weights, optimizer state and token ids") for line in lines)
    assert any("20.00 GB the estimate is 0%" in line for line in lines)
    assert "all-gather along data 18 3.00 GB 1.00 GB" in lines
    assert "attention by cuDNN" in lines
    assert "experts by XLA" in lines
    assert "instructions repeated to save memory: 2" in lines
    assert "kernels with too many registers: fusion_3" in lines
    assert lines[-1] == "It fits."


def test_the_compiler_decides_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = planned(monkeypatch, Compiled(4 * GB, 100 * GB, [], "loops", KERNELS, PROGRAM))
    assert code == 1
    assert "It does not fit into memory:" in text
    assert "collectives are not counted: loops" in text
    code, text = planned(monkeypatch, "Ran out of memory on HBM")
    assert code == 1
    assert "the compiler says: Ran out of memory on HBM" in text


def test_json_has_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Compiled(4 * GB, 16 * GB, [SENT], "", KERNELS, PROGRAM)
    code, text = planned(monkeypatch, result, "--json")
    found = json.loads(text)
    assert (code, found["fits"], found["compiled"]["fits"]) == (0, True, True)
    assert found["compiled"]["bytes_per_device"]["total"] == 20 * GB
    assert found["compiled"]["collectives"][0]["exposed_bytes"] == GB
    assert found["compiled"]["kernels"]["experts"] == ["XLA"]
    assert json.loads(planned(monkeypatch, "no memory", "--json")[1])["fits"] is False


def test_a_roofline_stands_below_the_compilers_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Compiled(4 * GB, 16 * GB, [SENT], "", KERNELS, PROGRAM)
    assert "utilization: at most" not in planned(monkeypatch, result)[1]
    code, text = planned(monkeypatch, result, "--roofline")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    assert "experts 0 0.004 0 0.00119 0.00119 100% memory 0.00119" in lines
    found = json.loads(planned(monkeypatch, result, "--roofline", "--json")[1])["roofline"]
    assert found["parts"]["experts"]["bytes"] == 4_000_000
    assert "utilization: at most" not in planned(monkeypatch, "no memory", "--roofline")[1]


def test_a_ladder_is_not_compiled() -> None:
    arguments = [str(Path("runs/layers")), "--device", "h100", "--compile", "--ladder", "1e15"]
    found = CliRunner().invoke(plan.main, arguments)
    assert str(found.exception) == "--compile: compile one run; leave out --ladder"
