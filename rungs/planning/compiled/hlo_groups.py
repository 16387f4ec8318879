"""The groups of devices that HLO text names: those of a collective operation.

A device's number is its position in the program's device assignment, which is
`mesh.devices.flat`. XLA calls it a partition id, or a global device id where an operation has
`use_global_device_ids`. The two are the same in a program of one replica, and `jax.jit` compiles
no other.
"""

import math
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices in each group."""

_DIMENSIONS = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(r"\[([\d,]+)\]<=" + _DIMENSIONS)
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")


def parse_groups(text: str, devices: int) -> Groups:
    """Parse the groups after `replica_groups=`, in any of the three forms that XLA writes.

    `{{0,1},{2,3}}`, where `{}` means all devices; `[2,2]<=[4]`; and `mesh['a'=2,'b'=2] {'b'}`:
    https://github.com/openxla/xla/blob/main/xla/hlo/ir/replica_group.h.

    Raises:
        ValueError: another form.
    """
    if text.startswith("{}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return parse_braces(text)
    if iota := _IOTA.match(text):
        return _as_groups(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if mesh := _MESH.match(text):
        return _mesh_groups(*mesh.groups(default=""))
    raise ValueError(f"replica_groups={text[:80]}: unknown form of groups")


def _mesh_groups(axes: str, device_ids: str, grouped: str) -> Groups:
    """Return groups of the devices that differ only in the grouped mesh axes, in mesh order.

    Args:
        axes: as in `'a'=2,'b'=4`.
        device_ids: of the mesh, as in `[4,2]T(1,0)` or `1,0,2,…`; in order if empty.
        grouped: as in `'a','b':(2)3`: all of axis a, and of axis b a factor of 3 that follows a
            factor of 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"([^',=]+)'?=(\d+)", axes)}
    places = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, before, part in re.findall(r"([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        part_size = int(part or sizes[name])
        stride = sizes[name] // (int(before or 1) * part_size)
        places[name] = places[name] - places[name] // stride % part_size * stride
    group_of = np.ravel_multi_index(tuple(places.values()), tuple(sizes.values())).ravel()
    numbers = _device_ids(device_ids, group_of.size)
    return _as_groups(numbers[group_of == group] for group in np.unique(group_of))


def _device_ids(text: str, count: int) -> NDArray[np.int64]:
    if iota := re.match(_DIMENSIONS, text):
        return _iota(iota[1], iota[2])
    return np.array(_numbers(text)) if text else np.arange(count)


def _iota(dimensions: str, order: str | None) -> NDArray[np.int64]:
    """Return 0, 1, 2, … as an array of these dimensions, transposed and then flattened."""
    shape = _numbers(dimensions)
    array = np.arange(math.prod(shape)).reshape(shape)
    return array.transpose(_numbers(order) if order else None).ravel()


def _as_groups(rows: Iterable[NDArray[np.int64]]) -> Groups:
    return tuple(tuple(row.tolist()) for row in rows)


def parse_braces(text: str) -> Groups:
    """Parse the groups at the start of a text such as `{{0,1},{2,3}}, …`.

    Raises:
        ValueError: another form.
    """
    outer = re.match(r"\{(?:\{[\d,]*\},?)*\}", text)
    if not outer:
        raise ValueError(f"{text[:80]}: unknown form of groups")
    return tuple(_numbers(inner) for inner in re.findall(r"\{([\d,]*)\}", outer[0]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
