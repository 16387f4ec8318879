"""Lets jax 0.10 use an MLIR context for several programs, as jax 0.11 does unasked."""

import importlib
import threading
from typing import Any

import jax

PROGRAMS = 50
"""Made with one context, which keeps all types and locations that it has seen."""


class _Made(threading.local):
    context: Any = None
    programs = 0


def reuse() -> None:
    """Reuse contexts in each thread. Making one takes 3 to 4 ms, of the 18 that a program of one
    operation needs."""
    if jax.version.__version_info__ >= (0, 11):
        return
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    make, made = mlir.make_ir_context, _Made()

    def make_or_reuse() -> Any:
        if made.programs % PROGRAMS == 0:
            made.context = make()
        made.programs += 1
        return made.context

    mlir.make_ir_context = make_or_reuse
