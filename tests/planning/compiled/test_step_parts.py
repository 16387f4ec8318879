"""Which part of a step an instruction belongs to."""

import pytest

from rungs.planning.compiled.hlo import Module
from rungs.planning.compiled.roofline import COLLECTIVES, COPIES, PARTS, REST, part_of

STEP = """
%fused_matmul (p0: f32[8,16], p1: f32[16,16]) -> f32[8,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,16]{1,0} parameter(1)
  %dot = f32[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/transpose(jvp(feed_forward))/dot_general"}
  ROOT %add = f32[8,16]{1,0} add(%dot, %p0), metadata={op_name="jit(train_step)/norm/add"}
}
%fused_slice (q0: f32[4,16,16], q1: s32[]) -> f32[16,16] {
  %q0 = f32[4,16,16]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %one = s32[] constant(1)
  %last = s32[] subtract(%q1, %one)
  %slice = f32[1,16,16]{2,1,0} dynamic-slice(%q0, %last, %one, %one), metadata={op_name="jit(train_step)/norm/slice"}
  ROOT %b = f32[16,16]{1,0} bitcast(%slice)
}
%fused_nameless (r0: f32[8,16]) -> f32[8] {
  %r0 = f32[8,16]{1,0} parameter(0)
  %exp = f32[8,16]{1,0} exponential(%r0), metadata={op_name="jit(train_step)/jvp(loss)/while/body/exp"}
  ROOT %sum = f32[8]{0} reduce(%exp, %r0), dimensions={1}, to_apply=%add
}
ENTRY %main {
  %x = f32[8,16]{1,0} parameter(0), metadata={op_name="loss"}
  %w = f32[4,16,16]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %moved = f32[16,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused_slice
  %started = ((f32[4,16,16]{2,1,0}, s32[]), f32[16,16]{1,0}, u32[]) fusion-start(%w, %i), kind=kLoop, calls=%fused_slice
  %matmul = f32[8,16]{1,0} fusion(%x, %moved), kind=kOutput, calls=%fused_matmul, metadata={op_name="jit(train_step)/norm/add"}
  %nameless = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_nameless
  %inner = f32[8,16]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(train_step)/attention_projections/attention/kernel"}
  %outer = f32[8,16]{1,0} negate(%x), metadata={op_name="jit(train_step)/attention_projections/neg"}
  %other = f32[8,16]{1,0} negate(%x), metadata={op_name="jit(train_step)/loss_limit/optimizer"}
  %sum = f32[8,16]{1,0} all-reduce(%x), to_apply=%add, metadata={op_name="jit(train_step)/feed_forward/psum"}
  %in = (f32[8,16]{1,0:S(1)}, f32[8,16]{1,0}, u32[]) copy-start(%x)
  %in_done = f32[8,16]{1,0:S(1)} copy-done(%in)
  %alias = f32[128]{0:S(1)} bitcast(%in_done)
  %used = f32[128]{0:S(1)} fusion(%alias), kind=kLoop, calls=%f, metadata={op_name="jit(train_step)/optimizer/mul"}
  %out = (f32[128]{0}, f32[128]{0:S(1)}, u32[]) copy-start(%used)
  %out_done = f32[128]{0} copy-done(%out)
  %copied = (f32[8,16]{0,1}, f32[8,16]{1,0}, u32[]) copy-start(%x)
  %unused = (f32[8,16]{1,0:S(1)}, f32[8,16]{1,0}, u32[]) copy-start(%x)
  ROOT %t = (f32[128]{0}) tuple(%out_done)
}
%f (s0: f32[128]) -> f32[128] {
  %s0 = f32[128]{0} parameter(0)
  ROOT %e = f32[128]{0} exponential(%s0)
}
"""  # noqa: E501 — as compilers write it


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("matmul", "feed-forward"),
        ("moved", COPIES),
        ("started", COPIES),
        ("nameless", "head and loss"),
        ("inner", "attention kernel"),
        ("outer", "attention projections"),
        ("other", REST),
        ("sum", COLLECTIVES),
        ("copied", COPIES),
        ("unused", COPIES),
        ("in", "optimizer"),
        ("out", "optimizer"),
    ],
)
def test_the_innermost_scope_says_what_an_instruction_belongs_to(name: str, part: str) -> None:
    """`in` and `out` are transfers to and from fast memory, which belong to what they serve."""
    module = Module.parse(STEP)
    assert part in PARTS
    assert part_of(module.find("main", name)) == part
