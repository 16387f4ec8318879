"""FLOPs of matmuls in HLO, against XLA's count and by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rungs.planning.compiled.hlo import Module
from rungs.planning.compiled.work import Matmul, matmuls_of

PROJECTION = """
ENTRY %main {
  %x = bf16[8,1024,768,1]{1,2,3,0} parameter(0)
  %w = bf16[12,64,768,1]{2,1,0,3} parameter(1)
  ROOT %c = f32[8,1024,12,64]{1,3,2,0} convolution(%x, %w), window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f, metadata={op_name="jit(f)/dot_general"}
}
"""  # noqa: E501 — as libtpu writes it
GRADIENT = """
ENTRY %main {
  %x = bf16[8,1024,3072]{2,1,0} parameter(0)
  %y = bf16[8,1024,768]{2,1,0} parameter(1)
  ROOT %c = f32[3072,768,1]{1,0,2} convolution(%x, %y), window={size=8}, dim_labels=0fb_0io->bf0
}
"""
CUBLAS = """
ENTRY %main {
  %x = f32[64,512]{1,0} parameter(0)
  %w = f32[512,32]{1,0} parameter(1)
  ROOT %c = (f32[64,32]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501 — as XLA writes it
EXPERTS = """
ENTRY %main {
  %groups = s32[36]{0} parameter(0)
  %x = bf16[2048,128]{1,0} parameter(1)
  %w = bf16[4,128,172]{2,1,0} parameter(2)
  ROOT %c = f32[2048,172]{1,0} custom-call(%groups, %x, %w), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/experts/pallas_call"}
}
"""  # noqa: E501 — as XLA writes it


def matmuls(program: Any) -> list[Matmul]:
    module = Module.parse(program)
    instructions = module.computations[module.entry]
    return [it for one in instructions for it in matmuls_of(one)]


@pytest.mark.parametrize("einsum", ["mk,kn->mn", "bmk,bnk->bmn", "kbm,kn->bmn"])
def test_flops_are_those_that_xla_counts(einsum: str) -> None:
    left, right = einsum.partition("->")[0].split(",")
    sizes = dict(zip("bmkn", (3, 16, 32, 64), strict=True))
    shapes = [
        jax.ShapeDtypeStruct([sizes[axis] for axis in axes], jnp.float32) for axes in (left, right)
    ]
    program = jax.jit(lambda x, y: jnp.einsum(einsum, x, y)).lower(*shapes).compile()
    analysis = program.cost_analysis()
    assert analysis is not None
    (found,) = matmuls(program)
    assert (found.flops, found.bits) == (analysis["flops"], 32)


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (PROJECTION, Matmul(2 * 8 * 1024 * 768 * 768, 16, "jit(f)/dot_general")),
        (GRADIENT, Matmul(2 * 8 * 1024 * 3072 * 768, 16, "")),
        (CUBLAS, Matmul(2 * 64 * 512 * 32, 32, "")),
        (EXPERTS, Matmul(2 * 2048 * 128 * 172, 16, "jit(f)/experts/pallas_call")),
    ],
    ids=["projection", "weight gradient", "cublas", "experts"],
)
def test_flops_of_what_accelerators_make_of_matmuls(program: str, found: Matmul) -> None:
    assert matmuls(program) == [found]


def test_a_matmul_that_cannot_be_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="of this __cublas"):
        matmuls(CUBLAS.replace("lhs_contracting", "unknown"))
    with pytest.raises(ValueError, match="of this kernel"):
        matmuls(EXPERTS.replace("[4,128,172]", "[512,172]"))
