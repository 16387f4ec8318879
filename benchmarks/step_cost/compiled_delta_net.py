"""What a Gated DeltaNet layer costs beside causal attention of the same width, as compiled for
accelerators that are not here.

Forward and backward pass in bfloat16 of one layer with its projections. FLOPs are those of matmuls:
counted in the traced program, or by formula for attention's kernel, whose program is its own. Bytes
are those of the operands and results of all kernels of the compiled program, in every trip of a
loop; of an array that a kernel takes a slice from or writes a slice to, the slice. The least time
is that of the FLOPs or of the bytes at the published figures, whichever is longer. Matmuls that ask
for all of float32, as those within a chunk do, are not done by a GPU's tensor cores, and take six
passes of a TPU's.
"""

from rungs.common.command import run_command

import re
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import SingleDeviceSharding

from benchmarks.step_cost.delta_net import LENGTHS, PATTERNS, WIDTH, config_of
from rungs.common.shown_text import align_columns
from rungs.model.attention import sequence_contexts
from rungs.model.blocks import Block
from rungs.model.kernels.gated_delta import CHUNK
from rungs.parallel import target_device
from rungs.planning import compiled_step
from rungs.planning.flops import matmul_flops
from rungs.planning.hardware import Hardware, device_by_name
from rungs.planning.program import Instruction, Module, bytes_of, kernels_of, trip_count

LAYERS = ("attention", "Gated DeltaNet")
IN_VECTOR_MEMORY = re.compile(r"\w+\[[^\]]*\]\{[^}]*S\(1\)[^}]*\}")
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")


EXACT_FLOPS = {"h200": 67e12, "tpu-v5e": 197e12 / 6}
"""FLOP/s in all of float32, as NVIDIA gives them, and a sixth of those in bfloat16."""


class Cost(NamedTuple):
    """Of a layer's two passes over a sequence."""

    flops: float
    """In bfloat16."""
    exact_flops: float
    """In float32."""
    moved: float
    """Bytes."""
    kernels: str

    def least_seconds(self, hardware: Hardware) -> float:
        assert hardware.flops
        assert hardware.bandwidth
        exact = self.exact_flops / EXACT_FLOPS[hardware.name]
        return max(self.flops / hardware.flops + exact, self.moved / hardware.bandwidth)


@click.command()
@click.option(
    "--device",
    multiple=True,
    type=click.Choice(list(EXACT_FLOPS)),
    default=tuple(EXACT_FLOPS),
    show_default=True,
)
def main(device: tuple[str, ...]) -> None:
    """Print a table for each device."""
    compiled_step.prepare()
    for hardware in map(device_by_name, device):
        header = ("tokens", "layer", "GFLOPs", "in float32", "GB", "least ms", "÷ attention")
        rows: list[tuple[str, ...]] = [(*header, "attention by")]
        for length in LENGTHS:
            costs = {layer: cost_of(layer, length, hardware) for layer in LAYERS}
            base = costs["attention"].least_seconds(hardware)
            for layer, cost in costs.items():
                seconds = cost.least_seconds(hardware)
                flops = (f"{each / 1e9:.1f}" for each in (cost.flops, cost.exact_flops))
                sizes = *flops, f"{cost.moved / 1e9:.3f}"
                times = f"{1000 * seconds:.3f}", f"{seconds / base:.2f}"
                rows.append((f"{length:,}", layer, *sizes, *times, cost.kernels))
        click.echo(f"{hardware.name}, compiled\n{align_columns(rows)}\n")


def cost_of(layer: str, length: int, hardware: Hardware) -> Cost:
    """Return what a layer costs."""
    traced, program = compile_layer(layer, length, hardware)
    kernel = "/".join(kernels_of(program).get("attention", {}))
    flops, exact = 0, 0
    for one, runs, _ in compiled_step.equations(traced):
        if is_exact(one):
            exact += runs * matmul_flops(one)
        else:
            flops += runs * matmul_flops(one)
    if kernel:
        flops = projections(length) + round(3.5 * 2 * WIDTH * length**2)
    moved = bytes_moved(Module.parse(program), length // CHUNK)
    return Cost(flops, exact, moved, kernel or "XLA")


def is_exact(equation: Any) -> bool:
    """Return whether it is a matmul in all of float32."""
    return "HIGHEST" in str(equation.params.get("precision"))


def projections(length: int) -> int:
    """Return the FLOPs of attention's four projections, forward and backward."""
    return 3 * 4 * 2 * length * WIDTH**2


def compile_layer(layer: str, length: int, hardware: Hardware) -> tuple[Any, str]:
    """Return a layer's two passes as traced, and their compiled program."""
    kind = PATTERNS[layer][0]
    config = config_of(PATTERNS[layer], length)

    def make() -> Any:
        block = Block(config, jax.random.key(0), kind)
        return block.attention or block.delta_net

    graph, state = nnx.split(nnx.eval_shape(make))
    place = SingleDeviceSharding(compiled_step.devices(hardware, 1)[0])

    def shape_of(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, jnp.bfloat16, sharding=place)

    def loss(state: nnx.State, x_BSD: Array) -> Array:
        context = sequence_contexts(config, length)[kind]
        return jnp.sum(nnx.merge(graph, state)(x_BSD, context)[0].astype(jnp.float32) ** 2)

    x_BSD = shape_of(jnp.zeros((1, length, WIDTH)))
    with target_device.trace_for(hardware.target, is_compiled=True):
        traced: Any = nnx.jit(jax.grad(loss, (0, 1))).trace(jax.tree.map(shape_of, state), x_BSD)
        return traced, traced.lower().compile().compiled.as_text()


def bytes_moved(module: Module, unknown_trips: int, computation: str = "") -> int:
    """Return the bytes that a program's kernels read and write. `unknown_trips` are those of loops
    for which the compiler does not say it."""
    own = module.computations[computation or module.entry]
    shapes = {one.name: one.shape for one in own}
    total = 0
    for one in own:
        if one.opcode == "while":
            body = next(name for role, name in one.called() if role == "body")
            trips = trip_count(one) or unknown_trips
            total += trips * bytes_moved(module, unknown_trips, body)
        elif one.opcode.removesuffix("-start") == "fusion":
            inside = module.inside(one)
            reads = (bytes_read(module, inside, name) for name in parameters(inside))
            total += sum(reads) + bytes_written(inside)
        elif one.opcode not in FREE and not one.opcode.endswith(("-done", "-update")):
            total += bytes_in_memory(one.shape)
            total += sum(bytes_in_memory(shapes[name]) for name in operands(one))
    return total


def bytes_written(inside: list[Instruction]) -> int:
    """Return the bytes of a fusion's results, which are its last instruction."""
    own = {one.name: one for one in inside}
    last = inside[-1]
    total = 0
    for name in operands(last) if last.opcode == "tuple" else [last.name]:
        one = own[origin(inside, name)]
        slice_of = operands(one)[1] if one.opcode == "dynamic-update-slice" else one.name
        in_memory = bytes_in_memory(own[name].shape)
        total += min(in_memory, bytes_of(own[slice_of].shape))
    return total


def bytes_read(module: Module, inside: list[Instruction], name: str) -> int:
    """Return the bytes that a fusion reads of an instruction, its parameter."""
    shape = next(one.shape for one in inside if one.name == name)
    total = 0
    for one in inside:
        places = [place for place, of in enumerate(operands(one)) if origin(inside, of) == name]
        if not places or one.opcode == "bitcast":
            continue
        if one.opcode == "dynamic-slice":
            total += bytes_of(one.shape)
        elif one.opcode == "fusion":
            inner = module.inside(one)
            total += sum(bytes_read(module, inner, parameters(inner)[place]) for place in places)
        elif one.opcode != "dynamic-update-slice" or places != [0]:
            total += bytes_of(shape)
    return min(total, bytes_in_memory(shape))


def parameters(inside: list[Instruction]) -> list[str]:
    """Return the names of a fusion's parameters in their order."""
    found = [
        (int(one.rest.partition(")")[0]), one.name) for one in inside if one.opcode == "parameter"
    ]
    return [name for _, name in sorted(found)]


def origin(inside: list[Instruction], name: str) -> str:
    """Return the instruction that a bitcast, or one of several, is of."""
    one = next(one for one in inside if one.name == name)
    return origin(inside, operands(one)[0]) if one.opcode == "bitcast" else name


def bytes_in_memory(shape: str) -> int:
    """Return the bytes of a shape without what is in a TPU's vector memory, which is written and
    read much faster."""
    return bytes_of(IN_VECTOR_MEMORY.sub("", shape))


def operands(one: Instruction) -> list[str]:
    return re.findall(r"%([\w.-]+)", one.rest.partition(")")[0])


if __name__ == "__main__":
    run_command(main)
