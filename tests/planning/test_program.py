"""What compiled programs send: real programs on virtual devices against hand-computed numbers, and
HLO text as XLA writes it for accelerators."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from rungs.planning.program import (
    KERNEL_PARTS,
    Collective,
    Groups,
    Traffic,
    axes_of,
    collectives,
    kernels_of,
    parse_groups,
    summary,
)
from tests.support.plan_cases import PlanCase, lowered

P = PartitionSpec
AB = jnp.zeros((8, 16), jnp.float32)


def mesh_of(data: int, tensor: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> Mesh:
    devices = np.array([jax.devices()[i] for i in order]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


MESH = mesh_of(2, 2)
COLUMNS, BOTH = P(None, "tensor"), P("data", "tensor")


def found_in(
    f: Callable[..., Any], *arrays: Array, mesh: Mesh = MESH, ins: Any = BOTH, outs: Any = BOTH
) -> list[Collective]:
    """Return the collectives of a function inside shard_map."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    return collectives(jax.jit(mapped).lower(*arrays).compile())


@pytest.mark.parametrize(
    ("f", "kind", "operand_bytes", "result_bytes", "moved_bytes"),
    [
        (lambda x: lax.psum(x, "data"), "all-reduce", 128, 128, 128),
        (lambda x: lax.all_gather(x, "data", tiled=True), "all-gather", 128, 256, 128),
        (lambda x: lax.psum_scatter(x, "data", tiled=True), "reduce-scatter", 128, 64, 64),
        (lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True), "all-to-all", 128, 128, 64),
    ],
)
def test_bytes_of_each_kind(
    f: Callable[[Array], Array],
    kind: str,
    operand_bytes: int,
    result_bytes: int,
    moved_bytes: int,
) -> None:
    (found,) = found_in(f, AB)  # (4, 8) of float32 on each device: 128 bytes
    assert (found.kind, found.groups, found.trips) == (kind, ((0, 2), (1, 3)), 1)
    assert (found.operand_bytes, found.result_bytes) == (operand_bytes, result_bytes)
    assert (found.moved_bytes, found.total_moved_bytes) == (moved_bytes, moved_bytes)
    assert axes_of(found.groups, MESH) == ("data",)


def test_a_ring_of_four_devices_sends_three_quarters_twice() -> None:
    (found,) = found_in(lambda x: lax.psum(x, ("data", "tensor")), AB)
    assert found.groups == ((0, 1, 2, 3),)
    assert found.moved_bytes == 2 * 3 * 128 // 4
    assert axes_of(found.groups, MESH) == ("data", "tensor")


def test_groups_of_a_permutation_are_its_pairs() -> None:
    (found,) = found_in(lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), AB)
    assert (found.kind, found.moved_bytes) == ("collective-permute", 128)
    assert set(found.groups) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert axes_of(found.groups, MESH) == ("tensor",)


def test_nested_scans_multiply() -> None:
    def body(h: Array, _: None) -> tuple[Array, None]:
        inner = lax.scan(lambda h, _: (lax.psum(jnp.sin(h), "tensor"), None), h, None, length=3)
        return lax.psum(inner[0], "data"), None

    found = found_in(lambda x: lax.scan(body, x, None, length=5)[0], AB)
    assert summary(found, MESH) == [
        Traffic("all-reduce", ("data",), 5, 5 * 128),
        Traffic("all-reduce", ("tensor",), 15, 15 * 128),
    ]
    assert all("psum" in one.op_name for one in found)


def test_a_branch_counts_as_if_it_always_ran() -> None:
    def either(x: Array, n: Array) -> Array:
        return lax.cond(n > 0, lambda x: lax.psum(x, "data"), lambda x: 2 * x, x)

    found = found_in(either, AB, jnp.int32(1), ins=(BOTH, P()))
    assert summary(found, MESH) == [Traffic("all-reduce", ("data",), 1, 128)]


def test_a_loop_of_unknown_length_is_rejected_only_with_a_collective() -> None:
    def repeat(step: Callable[[Array], Array]) -> list[Collective]:
        def loop(x: Array, n: Array) -> Array:
            return lax.fori_loop(0, n, lambda _, x: step(x), x)

        return found_in(loop, AB, jnp.int32(3), ins=(BOTH, P()))

    assert repeat(jnp.sin) == []
    with pytest.raises(ValueError, match=r"^while.*how many times.*all-reduce \(.*psum\)"):
        repeat(lambda x: lax.psum(x, "data"))


def test_an_axis_of_one_device_sends_nothing() -> None:
    one = mesh_of(4, 1)
    assert found_in(lambda x: lax.psum(x, "tensor"), AB, mesh=one) == []
    assert found_in(lambda x: lax.ppermute(x, "tensor", [(0, 0)]), AB, mesh=one) == []


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


def test_kernels_are_found_by_the_scope_that_they_are_called_in() -> None:
    assert kernels_of(PROGRAM) == {
        "attention": {"cuDNN": 2, "Pallas for Mosaic": 1},
        "experts": {"Pallas for Triton": 1},
    }


def test_a_step_has_the_scopes() -> None:
    step = lowered(PlanCase("mixtral", "dots", "dp", 1, "float32").run())
    scopes = set(re.findall(r"[/(](\w+)[/)]", step.as_text(debug_info=True)))
    assert scopes >= set(KERNEL_PARTS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("send(%x), channel_id=1", "send cannot be counted"),
        ("fusion(%x), calls=%f, kind=AllReduceScatterFusion", "cannot be counted"),
        ("all-reduce-start(%x), replica_groups={}", "all-reduce-start cannot be counted"),
        ("all-reduce(%x), replica_groups=mesh['a'=4] {'a':(1)2}", "unknown form"),
    ],
)
def test_what_is_not_known_is_not_counted_wrongly(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collectives(f"HloModule m, num_partitions=2\nENTRY %e {{\n  %a = f32[8]{{0}} {line}\n}}\n")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("{}, x", ((0, 1, 2, 3),)),
        ("[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", ((0, 1), (2, 3))),
    ],
)
def test_each_form_of_groups_is_read(text: str, groups: Groups) -> None:
    assert parse_groups(text, 4) == groups
