# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy>=2.2"]
# ///
"""What `train_speed.py` takes as the machine's peak: `matmul_peak.py jax|torch THREADS
[LARGEST]`.

Prints a line of JSON: for each dtype the FLOPs per second of the fastest matmul of two square
matrices. Only the library that is named has to be installed.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable

LEAST, MOST = 2048, 16384
LONG_SECONDS = 0.25
"""A matmul that takes so long would not be faster if it were larger."""
TRIES = 8
Matmul = Callable[[], None]


def main() -> None:
    library, threads = sys.argv[1], int(sys.argv[2])
    largest = int(sys.argv[3]) if len(sys.argv) > 3 else MOST
    make = jax_matmul if library == "jax" else functools.partial(torch_matmul, threads)
    print(json.dumps({dtype: peak(make, dtype, largest) for dtype in ("float32", "bfloat16")}))


def peak(make: Callable[[str, int], Matmul], dtype: str, largest: int) -> float:
    """Return the best of all tries with matrices that double until a matmul takes long."""
    best, size, seconds = 0.0, min(LEAST, largest), 0.0
    while seconds < LONG_SECONDS and size <= largest:
        seconds = fastest(make(dtype, size))
        best = max(best, 2 * size**3 / seconds)
        size *= 2
    return best


def fastest(matmul: Matmul) -> float:
    """Return the seconds of the fastest try, after a first one that is not counted."""
    matmul()
    best = float("inf")
    for _ in range(TRIES):
        begin = time.perf_counter()
        matmul()
        best = min(best, time.perf_counter() - begin)
    return best


def jax_matmul(dtype: str, size: int) -> Matmul:
    import jax

    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), dtype) for key in keys)
    multiply = jax.jit(jax.numpy.matmul)
    return lambda: multiply(left, right).block_until_ready()


def torch_matmul(threads: int, dtype: str, size: int) -> Matmul:
    import torch

    if os.environ.get("RUNGS_BENCHMARK_NEEDS_GPU") and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    left, right, result = (
        torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(3)
    )

    def matmul() -> None:
        torch.matmul(left, right, out=result)
        if on_cuda:
            torch.cuda.synchronize()

    return matmul


if __name__ == "__main__":
    main()
