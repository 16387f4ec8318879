"""`sharding` of `train.json` and `reinforce.json`: how devices share the work."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from rungs.common.strict_json import StrictModel, check
from rungs.config.base import CountOrAll, Size

Mode = Literal["dp", "fsdp", "tp", "fsdp_tp", "cp"]


class ShardingConfig(StrictModel):
    """How devices share the work: a mode, and a mesh of data × tensor devices; in cp, data ×
    context."""

    mode: Mode = "dp"
    """dp (data parallelism): each device along `data` computes its share of every microbatch; on
    accelerators it stores only its shard of the optimizer state (ZeRO-1, Rajbhandari et al. 2019).
    fsdp: it also stores only its shard of the parameters (ZeRO-3; Zhao et al. 2023). tp (tensor
    parallelism): the devices along `tensor` divide heads, hidden units and vocabulary (Shoeybi et
    al. 2019). fsdp_tp: fsdp along `data` and tp along `tensor`. cp (context parallelism), for long
    sequences: the devices along `context` divide the tokens of every sequence and, during
    attention, the heads (Jacobs et al. 2023); all devices together shard parameters and optimizer
    state as in fsdp."""
    data: CountOrAll | None = None
    """Devices along the data axis; must divide microbatch_size. -1: all remaining devices. Absent:
    1 in tp and cp, otherwise all remaining devices."""
    tensor: CountOrAll | None = None
    """Devices along the tensor axis. -1: all remaining devices. Absent: all remaining devices in tp
    and fsdp_tp, otherwise 1."""
    context: Annotated[CountOrAll | None, Field(exclude_if=lambda size: size is None)] = None
    """Devices along the context axis, in cp; must divide sequence_length and n_heads. -1 or absent:
    all remaining devices."""
    devices: Annotated[Size | None, Field(exclude_if=lambda count: count is None)] = None
    """How many of this machine's devices to use, the first ones; the others stay idle. For a single
    process. Absent: all."""

    @check
    def _sizes_fit_mode(self) -> Iterator[str]:
        if self.sizes == (-1, -1):
            last = self.axes[1]
            yield f"mode {self.mode!r} needs data or {last}; one of them may be -1 (all remaining)"
        elif self.devices is not None and math.prod(self.sizes) != self.devices:
            yield f"devices: {self.devices}, but {self.text} makes {math.prod(self.sizes)}"
        elif self.mode == "cp" and self.tensor not in (None, 1):
            yield f"mode 'cp' needs tensor 1, not {self.tensor}"
        elif self.mode != "cp" and self.context not in (None, 1):
            yield f"mode {self.mode!r} needs context 1, not {self.context}; or use mode 'cp'"
        elif line := mode_problem(self.mode, *self.sizes):
            yield line

    @classmethod
    def of(cls, mode: Mode, sizes: tuple[int, int]) -> Self:
        """Return the sharding of a mode on a mesh with these sizes."""
        return cls.model_validate({"mode": mode, **dict(zip(mesh_axes(mode), sizes, strict=True))})

    @property
    def axes(self) -> tuple[str, str]:
        """The names of the mesh axes."""
        return mesh_axes(self.mode)

    @property
    def sizes(self) -> tuple[int, int]:
        """Devices along both mesh axes; -1 for all remaining devices, if `devices` doesn't say how
        many these are."""
        data = self.data or (1 if self.mode in ("tp", "cp") else -1)
        if self.mode == "cp":
            last = self.context or -1
        else:
            last = self.tensor or (-1 if "tp" in self.mode else 1)
        if self.devices is None or (data, last) == (-1, -1):
            return data, last
        rest = max(self.devices // abs(data * last), 1)
        return rest if data == -1 else data, rest if last == -1 else last

    @property
    def text(self) -> str:
        """The mesh in words, such as "data 4 × tensor 2"."""
        sizes = zip(self.axes, self.sizes, strict=True)
        return " × ".join(f"{axis} {size}" for axis, size in sizes)


def mesh_axes(mode: str) -> tuple[str, str]:
    """Return the names of a mode's mesh axes, the one with the fastest links last."""
    return "data", "context" if mode == "cp" else "tensor"


def mode_problem(mode: str, data: int, last: int) -> str | None:
    """Return why a mode does not fit a mesh of these sizes along `mesh_axes` (-1: unknown), or
    None."""
    if mode == "cp":
        return None if last != 1 else "mode 'cp' needs context of at least 2; or use mode 'fsdp'"
    if mode in ("dp", "fsdp") and last != 1:
        return f"mode {mode!r} needs tensor 1, not {last}; for both axes use 'fsdp_tp'"
    if mode == "tp" and data != 1:
        return f"mode 'tp' needs data 1, not {data}; for both axes use 'fsdp_tp'"
    if mode == "fsdp_tp" and 1 in (data, last):
        other = "tp" if data == 1 else "fsdp"
        return (
            f"mode 'fsdp_tp' needs data and tensor of at least 2, not {data} and {last}; or use"
            f" mode {other!r}"
        )
    return None


def indivisible(key: str, size: int, parts: int, *mesh_axes: str) -> str | None:
    """Return why `parts` devices along mesh axes cannot divide a size evenly, or None."""
    if size % parts == 0:
        return None
    below = size // parts * parts
    near = [below, below + parts] if below else [parts]
    axes = " × ".join(f"sharding.{axis}" for axis in mesh_axes)
    return (
        f"{key}: {size} is not divisible by the {parts} devices of {axes};"
        f" use {' or '.join(map(str, near))}"
    )
