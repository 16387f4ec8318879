"""What is read from a compiled program's text and from its compiler's log."""

import os
import re

import pytest

from rungs.planning.compiled.step import KERNEL_PARTS, captured_stderr, kernels_of
from tests.support.plan_cases import PlanCase, lowered

PROGRAM = """
ENTRY %main {
  %dot_product_attention_fwd.25 = (bf16[1,4,128,32], u8[0]) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(train_step)/while/body/jvp(attention)/dot_product_attention_fwd" stack_frame_id=289}
  %dot_product_attention_bwd.2 = (bf16[1,4,128,32], u8[0]) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(train_step)/while/body/transpose(jvp(attention))/checkpoint/dot_product_attention_bwd"}
  %pallas_call.48 = f32[256,172]{1,0} custom-call(%b), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(train_step)/while/body/jvp(experts)/pallas_call"}
  %gemm.1 = f32[256,172]{1,0} custom-call(%b), custom_call_target="__cublas$gemm", metadata={op_name="jit(train_step)/while/body/jvp(experts)/dot_general"}
  %splash_mha_fwd_residuals.1 = f32[2,256]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(train_step)/jvp(attention)/pallas_call"}
  %nameless.1 = f32[2]{0} custom-call(%b), custom_call_target="tpu_custom_call"
  %convert.7.remat = bf16[8]{0} convert(%c), metadata={op_name="jit(train_step)/convert"}
  ROOT %add.3.remat2 = bf16[8]{0} add(%c, %c), metadata={op_name="loss"}
  %fusion.remat_compressed.clone = bf16[8]{0} copy(%convert.7.remat)
}
"""  # noqa: E501 — as compilers write it
LOG = [
    "I0000 ptxas: Registers are spilled to local memory in function 'fusion_3', 8 bytes spill\n",
    "W0000 something else about 'fusion_4'\n",
]


def test_kernels_are_found_by_the_scope_that_they_are_called_in() -> None:
    found = kernels_of(PROGRAM, LOG)
    assert found.calls == {
        "attention": {"cuDNN": 2, "Pallas for Mosaic": 1},
        "experts": {"Pallas for Triton": 1},
    }
    assert found.rematerialized == 3
    assert found.spilled == ["fusion_3"]


def test_a_step_has_the_scopes() -> None:
    step = lowered(PlanCase("mixtral", "dots", "dp", 1, "float32").run())
    scopes = set(re.findall(r"[/(](\w+)[/)]", step.as_text(debug_info=True)))
    assert scopes >= set(KERNEL_PARTS)


def test_what_compiled_code_writes_to_stderr_is_captured(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with captured_stderr() as lines:
        os.write(2, b"one\ntwo\n")
    os.write(2, b"three\n")
    assert lines == ["one\n", "two\n"]
    assert capfd.readouterr().err == "three\n"
