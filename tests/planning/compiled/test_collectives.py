"""What compiled programs send: real programs on virtual devices against hand-computed numbers, and
HLO text as XLA writes it for accelerators."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rungs.planning.compiled.collectives import Collective, Traffic, axes_of, collectives, summary

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


def test_several_results_add_up() -> None:
    found = found_in(
        lambda x: (lax.psum(x, "data"), lax.psum(x.sum(1), "data")), AB, outs=(COLUMNS, P())
    )
    assert sum(one.operand_bytes for one in found) == 128 + 4 * 4


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


@pytest.mark.parametrize(("recomputed", "sums"), [(False, 2 * 12), (True, 3 * 12)])
def test_remat_repeats_the_sums_of_the_forward_pass(recomputed: bool, sums: int) -> None:
    def layer(h: Array, w: Array) -> tuple[Array, None]:
        def inner(h: Array, _: None) -> tuple[Array, None]:
            return jnp.tanh(lax.psum(h @ w, "tensor")), None

        return lax.scan(inner, h, None, length=3)[0], None

    def loss(w: Array, x: Array) -> Array:
        return lax.scan(jax.checkpoint(layer) if recomputed else layer, x, w)[0].sum()

    w, x = jnp.zeros((4, 16, 16)), jnp.zeros((8, 16))
    found = found_in(jax.grad(loss), w, x, ins=(P(), P("data")), outs=P())
    assert summary(found, MESH) == [Traffic("all-reduce", ("tensor",), sums, sums * 4 * 16 * 4)]


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


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize(
    ("contracted", "axes", "moved_bytes"),
    [
        ("data", ("data",), 256),  # (8, 8) of float32
        ("tensor", ("tensor",), 256),
        (("tensor", "data"), ("data", "tensor"), 2 * 3 * 256 // 4),
    ],
)
def test_a_sum_that_the_partitioner_adds_is_found(
    contracted: Any, axes: tuple[str, ...], moved_bytes: int, order: tuple[int, ...]
) -> None:
    mesh = mesh_of(2, 2, order)
    places = NamedSharding(mesh, P(None, contracted)), NamedSharding(mesh, P(contracted))
    product = jax.jit(jnp.matmul, in_shardings=places, out_shardings=NamedSharding(mesh, P()))
    found = collectives(product.lower(AB, AB.T).compile())
    assert summary(found, mesh) == [Traffic("all-reduce", axes, 1, moved_bytes)]


def test_groups_are_positions_in_the_mesh_and_not_device_ids() -> None:
    mesh = mesh_of(2, 2, (2, 0, 1, 3))
    for f in (
        lambda x: lax.psum(x, "tensor"),
        lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True),
        lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
    ):
        (found,) = found_in(f, AB, mesh=mesh)
        assert axes_of(found.groups, mesh) == ("tensor",)


def hlo(*lines: str, computations: str = "", devices: int = 8) -> str:
    """Return a program with these lines in its entry."""
    body = "\n".join(f"  {line}" for line in lines)
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={devices}"
    return f"{header}\n\n{computations}\nENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def one_in(*lines: str, **program: Any) -> Collective:
    (found,) = collectives(hlo(*lines, **program))
    return found


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        (
            "mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'x'}", ((3, 0), (1, 2))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[a=2,b=6] {b:(3)2}", tuple((i, i + 1) for i in range(0, 12, 2))),
    ],
)
def test_groups_in_every_syntax(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    line = f"%r = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={text}, to_apply=%add"
    assert one_in(line, computations=ADD).groups == groups


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


@pytest.mark.parametrize(
    ("start", "done", "operand_bytes", "result_bytes"),
    [
        ("f32[4]{0} all-reduce-start(%p)", "all-reduce-done", 16, 16),
        ("(f32[4]{0}, bf16[6]{0}) all-reduce-start(%p, %q)", "all-reduce-done", 28, 28),
        ("((f32[4]{0}), f32[4]{0}) all-reduce-start(%p)", "all-reduce-done", 16, 16),
        (
            "((f32[4]{0}, bf16[6]{0}), (f32[4]{0}, bf16[6]{0})) all-reduce-start(%p, %q)",
            "all-reduce-done",
            28,
            28,
        ),
        ("(f32[4]{0}, f32[8]{0}) all-gather-start(%p)", "all-gather-done", 16, 32),
        (
            "((f32[4]{0}, bf16[6]{0}), (f32[8]{0}, bf16[12]{0})) all-gather-start(%p, %q)",
            "all-gather-done",
            28,
            56,
        ),
        ("((f32[4]{0}), f32[2]{0}) reduce-scatter-start(%p)", "reduce-scatter-done", 16, 8),
        ("((f32[4]{0}), f32[4]{0}, u32[]) all-to-all-start(%p)", "all-to-all-done", 16, 16),
    ],
)
def test_an_asynchronous_collective_counts_once_by_its_results(
    start: str, done: str, operand_bytes: int, result_bytes: int
) -> None:
    found = one_in(
        f"%s = {start}, channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add, "
        'metadata={op_name="jit(step)/psum"}, backend_config={"is_sync":false}',
        f"ROOT %d = f32[4]{{0}} {done}(%s)",
        computations=ADD,
    )
    assert found.kind == done.removesuffix("-done")
    assert (found.operand_bytes, found.result_bytes) == (operand_bytes, result_bytes)
    assert found.op_name == "jit(step)/psum"


@pytest.mark.parametrize("context", ["", ", u32[], u32[]"])
def test_an_asynchronous_permutation(context: str) -> None:
    found = one_in(
        f"%s = (f32[4]{{0}}, f32[4]{{0}}{context}) collective-permute-start(%p), channel_id=3, "
        "source_target_pairs={{0,0},{1,2},{2,1}}",
        "ROOT %d = f32[4]{0} collective-permute-done(%s)",
    )
    assert (found.kind, found.groups) == ("collective-permute", ((1, 2), (2, 1)))
    assert found.moved_bytes == 16


WRAPPED = """%wrapped (q: f32[8]) -> f32[4] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%q), replica_groups=[4,2]<=[8], to_apply=%add
}, execution_thread="parallel"
"""


def test_an_asynchronous_wrapper_counts_at_its_start() -> None:
    found = one_in(
        "%s = ((f32[8]{0}), f32[4]{0}, u32[]{:S(2)}) async-start(%p), calls=%wrapped",
        "%u = ((f32[8]{0}), f32[4]{0}, u32[]{:S(2)}) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[4]{0} async-done(%u), calls=%wrapped",
        computations=ADD + WRAPPED,
    )
    assert (found.kind, found.operand_bytes, found.result_bytes) == ("reduce-scatter", 32, 16)


def test_an_all_reduce_of_which_a_tpu_keeps_a_part_is_a_reduce_scatter() -> None:
    program = hlo(
        "%f = f32[6]{0} fusion(%p), kind=kCustom, calls=%scatter, backend_config="
        '{"collective_algorithm_config":{"emitter":"SingleInputAllReduceScatterFusion"}}',
        computations="""%scatter (x: f32[40]) -> f32[6] {
  %x = f32[40]{0} parameter(0)
  %sum = f32[48]{0} all-reduce(%x), channel_id=7, replica_groups={{0,1,2,3,4,5,6,7}}
  ROOT %part = f32[6]{0} dynamic-slice(%sum, %x), dynamic_slice_sizes={6}
}
""",
    )
    (found,) = collectives(program)
    assert (found.kind, found.operand_bytes, found.result_bytes) == ("reduce-scatter", 192, 24)
    assert found.moved_bytes == 7 * 24


def test_calls_fusions_and_branches_are_followed() -> None:
    found = collectives(
        hlo(
            "%c = f32[4]{0} call(%p), to_apply=%wrapped",
            "%f = f32[4]{0} fusion(%p), kind=kCustom, calls=%wrapped",
            "%i = f32[4]{0} conditional(%p, %c, %c), branch_computations={%add, %wrapped}",
            "%b = f32[4]{0} conditional(%p, %c, %c), true_computation=%wrapped, "
            "false_computation=%wrapped",
            computations=ADD + WRAPPED,
        )
    )
    assert [one.kind for one in found] == ["reduce-scatter"] * 5


def test_the_condition_of_a_loop_runs_once_more_than_its_body() -> None:
    for condition, body, trips in (("%add", "%wrapped", 4), ("%wrapped", "%add", 5)):
        found = one_in(
            f"%w = f32[4]{{0}} while(%p), condition={condition}, body={body}, "
            'metadata={op_name="jit(step)/while"}, backend_config={"known_trip_count":{"n":"4"}}',
            computations=ADD + WRAPPED,
        )
        assert found.trips == trips
        assert found.total_moved_bytes == trips * 16


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[16,512]{1,0:T(8,128)(2,1)S(1)}", 16 * 512 * 2),
        (
            "(f32[2]{0}, s8[3]{0}, pred[5]{0}, u64[], token[], /*index=5*/f16[7]{0})",
            8 + 3 + 5 + 8 + 0 + 14,
        ),
        ("(f8e4m3fn[3]{0}, f8e5m2[2]{0}, s4[3]{0}, c64[2]{0}, f64[<=4]{0})", 5 + 2 + 16 + 32),
        ("f32[0,4]{1,0}", 0),
    ],
)
def test_bytes_of_dtypes_tuples_and_layouts(shape: str, size: int) -> None:
    line = f"%a = {shape} all-to-all(%p, /*index=5*/%q), replica_groups={{{{0,1}}}}"
    assert one_in(line).result_bytes == size


def test_bytes_are_rounded_up() -> None:
    line = "%r = f32[] all-reduce(%p), replica_groups={{0,1,2}}, to_apply=%add"
    assert one_in(line, computations=ADD).moved_bytes == 6  # 2 · 4 · 2/3 = 5.3


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("", "no ENTRY"),
        (hlo("%r = f32[4] all-reduce(%p), replica_groups=ring(8)"), "unknown form"),
        (hlo("%r = f32[4] collective-permute(%p), source_target_pairs=[8]"), "unknown form"),
        (hlo("%r = float[4] all-gather(%p), replica_groups={}"), "float"),
        (hlo("%r = f32[4] ragged-all-to-all(%p), replica_groups={}"), "ragged-all-to-all"),
        (hlo("%r = (f32[4], u32[], token[]) send(%p, %t), channel_id=1"), "bytes of a send cannot"),
    ],
)
def test_unsupported_hlo_is_rejected(program: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        collectives(program)


def test_a_send_to_the_host_is_not_a_collective() -> None:
    send = "%r = (f32[4], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true"
    assert collectives(hlo(send)) == []


def test_a_program_of_a_larger_mesh_is_rejected() -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        axes_of(((0, 4),), MESH)
