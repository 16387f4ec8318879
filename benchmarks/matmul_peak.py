# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy>=2.2"]
# ///
"""What `train_speed.py` takes as the machine's peak: `matmul_peak.py jax|torch THREADS`.

Prints a line of JSON: for each type the FLOP per second of the fastest product of two square
matrices. A Python needs only the library that is named.
"""

import functools
import json
import sys
import time
from collections.abc import Callable

LEAST, MOST = 2048, 16384
LONG_SECONDS = 0.25
"""A product that takes so long has nothing to gain from being larger."""
TRIES = 8
Product = Callable[[], None]


def main() -> None:
    library, threads = sys.argv[1], int(sys.argv[2])
    make = jax_product if library == "jax" else functools.partial(torch_product, threads)
    print(json.dumps({dtype: peak(make, dtype) for dtype in ("float32", "bfloat16")}))


def peak(make: Callable[[str, int], Product], dtype: str) -> float:
    """The best of all tries with matrices that double until a product takes long."""
    best, size, seconds = 0.0, LEAST, 0.0
    while seconds < LONG_SECONDS and size <= MOST:
        seconds = fastest(make(dtype, size))
        best = max(best, 2 * size**3 / seconds)
        size *= 2
    return best


def fastest(product: Product) -> float:
    """Seconds, after a first product that is not counted."""
    product()
    best = float("inf")
    for _ in range(TRIES):
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return best


def jax_product(dtype: str, size: int) -> Product:
    import jax

    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (size, size), dtype) for key in keys)
    multiply = jax.jit(jax.numpy.matmul)
    return lambda: multiply(left, right).block_until_ready()


def torch_product(threads: int, dtype: str, size: int) -> Product:
    import torch

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    on_cuda = torch.cuda.is_available()
    device = "cuda" if on_cuda else "cpu"
    left, right, result = (
        torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(3)
    )

    def product() -> None:
        torch.matmul(left, right, out=result)
        if on_cuda:
            torch.cuda.synchronize()

    return product


if __name__ == "__main__":
    main()
