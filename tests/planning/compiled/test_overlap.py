"""Which collectives are hidden behind matmuls: HLO text as XLA's GPU and TPU compilers write it,
and programs compiled by them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel.sharding import abstract_mesh
from rungs.planning.compiled import targets
from rungs.planning.compiled.collectives import Traffic, collectives, overlaps, summary
from rungs.planning.compiled.step import Compiled, compile_step
from rungs.planning.hardware import device_by_name
from tests.planning.compiled.test_targets import NEEDS_CUDA
from tests.support.configs import model_config, train_config
from tests.support.plan_cases import FAMILIES

targets.prepare()
MESH = abstract_mesh((4, 2), ("data", "tensor"))
GROUPS = "replica_groups=[2,4]<=[4,2]T(1,0)"  # along data
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
GEMM = """%gemm (a: bf16[8,8], b: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = bf16[8,8]{1,0} parameter(1)
  ROOT %dot = bf16[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
CONVERT = """%convert (c: f32[8,8]) -> bf16[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %narrow = bf16[8,8]{1,0} convert(%c)
}
"""
START = f"%s = (f32[2,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%p), channel_id=1, {GROUPS}"
DONE = "%d = f32[8,8]{1,0} all-gather-done(%s)"
MATMUL = "%m = bf16[8,8]{1,0} fusion(%p, %p), kind=kCustom, calls=%gemm"


def hlo(*lines: str, computations: str = "", scheduled: bool = True) -> str:
    """Return a program of eight devices with these lines in its entry."""
    body = "\n".join(f"  {line}" for line in lines)
    header = f"HloModule step{', is_scheduled=true' if scheduled else ''}, num_partitions=8"
    before = ADD + GEMM + CONVERT + computations
    return f"{header}\n\n{before}\nENTRY %main (p: f32[2,8]) -> f32[8,8] {{\n{body}\n}}\n"


def matmuls(*lines: str, **program: Any) -> list[int]:
    return [one.matmuls for one in overlaps(hlo(*lines, **program))]


@pytest.mark.parametrize(
    ("between", "count"),
    [
        ("%m = bf16[8,8] dot(%p, %p), lhs_contracting_dims={1}", 1),
        (MATMUL, 1),
        ('%m = (bf16[8,8], s8[4]) custom-call(%p), custom_call_target="__cublas$gemm"', 1),
        ('%m = (f32[8,8], u8[0]) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"', 1),
        ('%m = f32[8,8] custom-call(%p), custom_call_target="__gpu$xla.gpu.triton"', 1),
        ('%m = f32[8,8] custom-call(%p), custom_call_target="tpu_custom_call"', 1),
        ("%m = f32[8,8] convolution(%p, %p), dim_labels=bf_io->bf", 1),
        ("%m = bf16[8,8] fusion(%p), kind=kLoop, calls=%convert", 0),
        ('%m = f32[8,8] custom-call(), custom_call_target="AllocateBuffer"', 0),
        ("%m = f32[8,8] call(%p, %p), to_apply=%gemm", 1),
        ("%m = f32[8,8] copy(%p)", 0),
    ],
)
def test_what_counts_as_a_matmul(between: str, count: int) -> None:
    assert matmuls(START, between, DONE) == [count]


def test_only_what_stands_between_start_and_done_counts() -> None:
    assert matmuls(MATMUL, START, DONE, MATMUL) == [0]
    assert matmuls(MATMUL, START, MATMUL, MATMUL, DONE, MATMUL) == [2]


def test_a_synchronous_collective_is_exposed() -> None:
    line = f"%r = f32[8,8] all-reduce(%p), {GROUPS}, to_apply=%add"
    assert matmuls(MATMUL, line, MATMUL) == [0]


def test_starts_and_ends_may_interleave() -> None:
    second, its_end = START.replace("%s =", "%s.2 ="), DONE.replace("%s)", "%s.2)")
    assert matmuls(START, MATMUL, second, MATMUL, DONE, MATMUL, its_end) == [2, 2]
    assert matmuls(START, second, DONE, MATMUL, its_end) == [0, 1]


WRAPPED = f"""%wrapped (q: f32[8,8]) -> f32[2,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %rs = f32[2,8]{{1,0}} reduce-scatter(%q), {GROUPS}, to_apply=%add
}}, execution_thread="parallel"
"""


def test_a_wrapped_collective_ends_after_its_updates() -> None:
    shape = "((f32[8,8]{1,0}), f32[2,8]{1,0}, u32[]{:S(2)})"
    assert matmuls(
        f"%s = {shape} async-start(%p), calls=%wrapped",
        MATMUL,
        f"%u = {shape} async-update(%s), calls=%wrapped",
        MATMUL,
        "ROOT %d = f32[2,8]{1,0} async-done(%u), calls=%wrapped",
        MATMUL,
        computations=WRAPPED,
    ) == [2]


LOOP = f"""%body (t: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {{
  %t = (s32[], f32[2,8]{{1,0}}) parameter(0)
  %p = f32[2,8]{{1,0}} get-tuple-element(%t), index=1
  {START}
  {MATMUL}
  {DONE}
}}

%condition (t: (s32[], f32[2,8])) -> pred[] {{
  %t = (s32[], f32[2,8]{{1,0}}) parameter(0)
  ROOT %true = pred[] constant(true)
}}
"""
WHILE = (
    "%w = (s32[], f32[2,8]) while(%t), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"3"}}'
)


def test_loops_multiply_bytes_and_the_matmuls_that_hide_others() -> None:
    one = START.replace("%s =", "%s.9 ="), WHILE, DONE.replace("%s)", "%s.9)")
    found = overlaps(hlo(*one, computations=LOOP))
    assert [(one.trips, one.matmuls) for one in found] == [(1, 3), (3, 1)]
    array_bytes = 8 * 8 * 4
    sent = array_bytes * 3 // 4
    assert summary(found, MESH) == [Traffic("all-gather", ("data",), 4, 4 * sent, 4 * sent)]


def test_hidden_and_exposed_bytes_add_up() -> None:
    along_tensor = "%r = f32[8,8] all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add"
    exposed = START.replace("%s =", "%s.2 ="), DONE.replace("%s)", "%s.2)")
    program = hlo(START, MATMUL, DONE, *exposed, along_tensor)
    found = summary(overlaps(program), MESH)
    assert [(one.kind, one.axes) for one in found] == [
        ("all-gather", ("data",)),
        ("all-reduce", ("tensor",)),
    ]
    assert [(one.hidden_bytes, one.exposed_bytes) for one in found] == [(192, 192), (0, 256)]
    sent = {(one.kind, one.axes): one.moved_bytes for one in found}
    assert sent == {t[:2]: t.moved_bytes for t in summary(collectives(program), MESH)}


def in_chain(name: str, end: str, chain: int = 7) -> str:
    """Return a fused computation of a TPU program with a part of an asynchronous all-gather."""
    return f"""%{name} (q: f32[2,8]) -> f32[8,8] {{
  %q = f32[2,8]{{1,0}} parameter(0)
  %ag = f32[8,8]{{1,0:T(8,128)S(1)}} all-gather(%q), channel_id=1, {GROUPS}, dimensions={{0}}, \
frontend_attributes={{chain_id="{chain}"}}
  {end}
}}
"""


TPU = (
    in_chain(
        "begin", 'ROOT %c = f32[8,8] custom-call(%ag), custom_call_target="AsyncCollectiveStart"'
    )
    + in_chain("meanwhile", "ROOT %dot = f32[8,8] convolution(%ag, %ag), dim_labels=bf_io->bf")
    + in_chain(
        "end", 'ROOT %c = f32[8,8] custom-call(%ag), custom_call_target="AsyncCollectiveDone"'
    )
    + in_chain(
        "other", 'ROOT %c = f32[8] custom-call(%ag), custom_call_target="AsyncCollectiveDone"', 8
    )
)
"""The forms of libtpu 0.0.42."""


def test_a_collective_that_a_tpu_fuses_with_matmuls_counts_once() -> None:
    program = hlo(
        "%a = (f32[8,8], u32[]) fusion(%p), kind=kCustom, calls=%begin",
        "%x = f32[8,8] fusion(%p), kind=kCustom, calls=%other",
        "%m = (f32[8,8], u32[]) fusion(%a), kind=kOutput, calls=%meanwhile",
        "%d = f32[8,8] fusion(%m), kind=kCustom, calls=%end",
        MATMUL,
        computations=TPU,
    )
    (found,) = overlaps(program)
    assert (found.kind, found.matmuls) == ("all-gather", 1)
    assert found.hidden_bytes == 192


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((START,), "the end of this collective"),
        (("%a = f32[8] fusion(%p), kind=kCustom, calls=%begin",), "the end of this collective"),
    ],
)
def test_a_start_without_an_end_is_rejected(lines: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        overlaps(hlo(*lines, computations=TPU))


def test_a_program_without_a_schedule_is_rejected() -> None:
    with pytest.raises(ValueError, match="no schedule"):
        overlaps(hlo(START, DONE, scheduled=False))


LAYERS, WIDTH = 6, 1024


def weights_gathered_in_a_scan(mesh: Mesh) -> jax.stages.Compiled:
    """Compile a scan over layers, each of which all-gathers its weights."""
    split = PartitionSpec(None, "data")

    def layers(w_LDD: Array, x_BD: Array) -> Array:
        def layer(x_BD: Array, w_DD: Array) -> tuple[Array, None]:
            full_DD = jax.lax.all_gather(w_DD, "data", tiled=True)
            return jnp.tanh(x_BD @ full_DD), None

        return jax.lax.scan(layer, x_BD, w_LDD)[0]

    batch = PartitionSpec("data")
    mapped = jax.shard_map(layers, mesh=mesh, in_specs=(split, batch), out_specs=batch)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((LAYERS, WIDTH, WIDTH), split), ((8192, WIDTH), batch))
    ]
    return jax.jit(mapped).lower(*arguments).compile()


SENT = LAYERS * WIDTH * WIDTH * 2 * 3 // 4


@pytest.mark.long
@pytest.mark.parametrize(("name", "count_in_text"), [("tpu-v5e", ""), ("h100", "known_trip_count")])
def test_loops_are_counted_in_compiled_programs(name: str, count_in_text: str) -> None:
    device = device_by_name(name)
    if not targets.is_installed(device):
        pytest.skip(f"the compiler for {name} is not installed")
    devices = np.array(targets.devices(device, 4))
    check_gathered_layers(Mesh(devices, "data", axis_types=(AxisType.Auto,)), count_in_text)


def check_gathered_layers(mesh: Mesh, count_in_text: str) -> None:
    compiled = weights_gathered_in_a_scan(mesh)
    text = compiled.as_text() or ""
    assert "while(" in text
    assert count_in_text in text
    (found,) = summary(overlaps(compiled), mesh)
    assert (found.kind, found.axes, found.moved_bytes) == ("all-gather", ("data",), SENT)
    assert 0 <= found.hidden_bytes <= SENT


@pytest.mark.long
@NEEDS_CUDA
@pytest.mark.parametrize(("microbatches", "gathered", "reduced"), [(1, 0.85, 0.85), (4, 0.1, 0.9)])
def test_gpus_compute_while_they_send_weights_and_gradients(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, gathered: float, reduced: float
) -> None:
    """At least these shares are hidden, by the flags of `gpu_settings.py`. Without
    `COMMON_FLAGS` it fails with jax 0.11 only, which also needs tuning for heads of 128."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    size = {"emb_dim": 1024, "n_layers": 16, "n_heads": 8, "ffn_dim": 4096}
    tokens = {"vocab_size": 4096, "context_length": 2048}
    model = model_config(**{**FAMILIES["llama"], **size, **tokens})
    train = train_config(
        dataset="none",
        microbatch_size=32,
        gradient_accumulation_steps=microbatches,
        compute_dtype="bfloat16",
        sharding=ShardingConfig(mode="fsdp", data=8, tensor=1),
    )
    result = compile_step(RunConfig(model, train), device_by_name("h100")).result
    assert isinstance(result, Compiled)
    sent = {one.kind: one for one in result.traffic}
    for kind, least in ("all-gather", gathered), ("reduce-scatter", reduced):
        assert sent[kind].hidden_bytes >= least * sent[kind].moved_bytes
