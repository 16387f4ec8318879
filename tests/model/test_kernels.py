"""Each kernel against its plain form and float64."""

import functools
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rungs.config.run_config import RunConfig
from rungs.model.attention import causal_mask, plain_attention
from rungs.model.gpt import GPT, head_logits
from rungs.model.kernels import blockwise_attention, cross_entropy, cudnn_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.kernels.matmul import matmul
from rungs.model.positions import over_batch
from rungs.model.remat import save_marked
from rungs.objectives.table import make_train_step
from rungs.parallel import collectives, sharding, target_device
from rungs.parallel.sharding import DATA
from rungs.step.state import create_model_and_optimizer, named_arrays
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.tiny_model import bind_and_jit, quick_jit

ROUNDING = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
"""Relative to the largest element, after one or two matmuls of operands in these dtypes."""


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    array = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(array, jnp.float32).astype(dtype)


def with_gradients(function: Any, *arrays: jax.Array, jit: Any = jax.jit) -> tuple[jax.Array, ...]:
    """Return the output, and the gradient of a random mixture of it for each array."""

    @jit
    def both(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(function, *arrays)
        return y, *pull(random(*y.shape, seed=9).astype(y.dtype))

    return both(*arrays)


def assert_near(found: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        wide = np.asarray(other, np.float64)
        distance = np.abs(np.asarray(one, np.float64) - wide).max(initial=0)
        assert distance <= tolerance * np.abs(wide).max(initial=1.0)


ROWS, INPUTS, OUTPUTS = (1, 16, 65), (1, 7, 64), (1, 5, 96)
SHAPES = [(ROWS[i], INPUTS[j], OUTPUTS[(i + j) % 3]) for i in range(3) for j in range(3)]


def products(x: np.ndarray, kernel: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return a matmul in float64, and its gradients."""
    return x @ kernel, dy @ kernel.T, x.T @ dy


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_matmul_and_its_gradients_are_exact(dtype: str, is_transposed: bool) -> None:
    """In many shapes, because the compiler has different code for each; transposed, as for a tied
    head. The error of a sum is relative to that of the terms' magnitudes: terms may cancel, and
    the compiler adds them in any order."""
    for rows, inputs, outputs in SHAPES:
        x = random(rows, inputs, dtype=dtype)
        kernel = random(inputs, outputs, seed=1).astype(dtype).astype(jnp.float32)
        dy = random(rows, outputs, seed=9).astype(dtype)

        def matmul_with(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return matmul(x, kernel.T if is_transposed else kernel)

        y, dx, dkernel = with_gradients(matmul_with, x, kernel.T if is_transposed else kernel)
        assert (y.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, x.dtype, jnp.float32)
        wide = [np.asarray(array, np.float64) for array in (x, kernel, dy)]
        sizes = products(*map(np.abs, wide))
        computed = y, dx, dkernel.T if is_transposed else dkernel
        for found, exact, size in zip(computed, products(*wide), sizes, strict=True):
            limit = ROUNDING[dtype] if found is dx else ROUNDING["float32"]
            assert (np.abs(np.asarray(found, np.float64) - exact) <= limit * size).all()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_the_gradient_of_what_all_sequences_share_is_a_sum(
    count: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_device, "platform", lambda: platform)
    x = random(5, 33)
    y, dx = with_gradients(lambda x: over_batch(x, count), x)
    np.testing.assert_array_equal(y, np.stack([x] * count))
    exact = np.asarray(random(count, 5, 33, seed=9), np.float64).sum(axis=0)
    np.testing.assert_allclose(dx, exact, atol=2e-6)


KINDS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": 100},
    {"soft_cap": 2.0},
    {"window": 70, "soft_cap": 1.5},
]


@pytest.mark.parametrize(
    ("length", "kind"), [*((65, kind) for kind in KINDS), (1, KINDS[0]), (150, KINDS[-1])], ids=str
)
def test_blockwise_attention_matches_plain_attention(length: int, kind: dict[str, Any]) -> None:
    query, key, value = (random(2, length, n, 8, seed=n) for n in (4, 2, 2))
    mask = causal_mask(length, kind.get("window"))
    cap = kind.get("soft_cap")
    plain = functools.partial(plain_attention, mask=mask, scale=0.7, soft_cap=cap)
    blockwise = functools.partial(
        blockwise_attention.causal_attention, scoring=Scoring(0.7, **kind)
    )
    found = with_gradients(blockwise, query, key, value)
    expected = with_gradients(plain, query, key, value, jit=quick_jit)
    assert_near(found, expected, 3e-6)


@pytest.mark.parametrize(("dtype", "kv_heads"), [("bfloat16", 2), ("float16", 1)])
def test_blockwise_attention_in_16_bits(dtype: str, kv_heads: int) -> None:
    arrays = [random(2, 192, n, 16, seed=n, dtype=dtype) for n in (4, kv_heads, kv_heads)]
    wide = [array.astype(jnp.float32) for array in arrays]
    plain = functools.partial(plain_attention, mask=causal_mask(192), scale=0.25)
    blockwise = functools.partial(blockwise_attention.causal_attention, scoring=Scoring(0.25))
    found = with_gradients(blockwise, *arrays)
    assert all(array.dtype == dtype for array in found)
    wanted = [array.astype(dtype) for array in with_gradients(plain, *wide, jit=quick_jit)]
    assert_near(found, wanted, ROUNDING["bfloat16"])


def test_queries_of_a_block_do_not_attend_to_later_keys() -> None:
    query, key, value = (random(1, 130, 1, 4, seed=n) for n in range(3))

    def output_at(key: jax.Array, at: jax.Array) -> jax.Array:
        return blockwise_attention.causal_attention(query, key, value, Scoring(0.5))[0, at].sum()

    gradient_at = quick_jit(jax.grad(output_at))
    for at in (0, 63, 64, 100):
        gradient = np.asarray(gradient_at(key, at))
        assert not gradient[0, at + 1 :].any()
        assert at == 0 or gradient[0, :at].any()


def head(x_MD: jax.Array, matrix_DV: jax.Array) -> jax.Array:
    return 3 * jnp.tanh(matmul(x_MD, matrix_DV) / 3)


def plain_loss(x: jax.Array, matrix: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the cross-entropy by its definition."""
    logarithms = jax.nn.log_softmax(head(x, matrix))
    own = logarithms[jnp.arange(len(targets)), jnp.maximum(targets, 0)]
    return -jnp.where(targets >= 0, own, 0).sum()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("tokens", "max_bytes"),
    [(1, 64 * 50 * 4), (200, 64 * 50 * 4), (63, 1), (64, 1 << 30), (333, 64 * 50 * 4)],
)
def test_loss_in_chunks_matches_the_loss_of_all_logits(
    tokens: int, max_bytes: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.LOGITS_BYTES, platform, max_bytes)
    x, matrix = random(tokens, 16), random(16, 50, seed=1)
    targets = jnp.asarray(np.random.default_rng(2).integers(-1, 50, tokens), jnp.int32)

    def chunked(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return 7 * cross_entropy.summed_loss(head, x, matrix, targets)

    statistics = functools.partial(cross_entropy.target_statistics, head)
    with target_device.trace_for(target_device.Target(platform)):
        found = with_gradients(chunked, x, matrix, jit=quick_jit)
        log_probs, _ = quick_jit(statistics)(x, matrix, targets)
    wanted = with_gradients(lambda x, m: 7 * plain_loss(x, m, targets), x, matrix, jit=quick_jit)
    assert_near(found, wanted, 3e-6)
    assert log_probs.shape == (tokens,)
    assert float(log_probs.sum()) == pytest.approx(-float(wanted[0]) / 7, rel=2e-6)
    assert not np.asarray(log_probs)[np.asarray(targets) < 0].any()


@pytest.mark.parametrize("vocabulary", [1_000, 32_000, 50_304, 151_936, 262_144])
@pytest.mark.parametrize("tokens", [1, 511, 1024, 8 * 1024, 12 * 2048, 96 * 1024, 100_001])
def test_a_gpus_chunks_are_whole_tiles_where_that_takes_few_more(
    tokens: int, vocabulary: int
) -> None:
    def size_on(platform: str) -> int:
        with target_device.trace_for(target_device.Target(platform)):
            return cross_entropy.chunk_tokens(tokens, vocabulary)

    size, any_size = size_on("gpu"), size_on("tpu")
    assert any_size / 2 <= size <= any_size
    if size != any_size or not tokens % 1024:
        assert not tokens % size
        assert not size % 128


def reduce_by_halves(operands: Any, _starts: Any, combine: Any, _axes: Any) -> Any:
    """Do what `jax.lax.reduce` does to the last axis, of a power of two, in the order in which a
    GPU may: pairs first. A CPU combines one element after another with the start."""
    while (width := operands[0].shape[-1]) > 1:
        halves = [jnp.split(operand, [width // 2], axis=-1) for operand in operands]
        operands = combine(*zip(*halves, strict=True))
    return tuple(operand[..., 0] for operand in operands)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_logits_of_any_size_have_a_finite_loss(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinite ones are those of the vocabulary's padding."""
    monkeypatch.setattr(jax.lax, "reduce", reduce_by_halves)
    x, targets = jnp.eye(4), jnp.asarray([0, 1, 2, 2])
    rows = [[3e38, -3e38, 0, -jnp.inf], [-jnp.inf, 5, -jnp.inf, 4.5], [-1e4] * 4, [1e4] * 4]
    matrix = jnp.asarray(rows, jnp.float32)
    with target_device.trace_for(target_device.Target(platform)):
        losses, _ = cross_entropy.target_statistics(
            lambda x, m: m[x.argmax(-1)], x, matrix, targets
        )
    wanted = [0, np.log1p(np.exp(-0.5)), np.log(4), np.log(4)]
    np.testing.assert_allclose(-losses, wanted, rtol=1e-6)


def test_logits_in_bfloat16_round_the_loss_and_not_its_sums() -> None:
    """A row's loss is off by at most the rounding of two logits, and no mean is."""
    config = model_config(vocab_size=300)
    x, matrix = random(512, 16, dtype="bfloat16"), random(16, 300, seed=1)
    targets = jnp.asarray(np.random.default_rng(2).integers(0, 300, 512), jnp.int32)

    def losses(dtype: str) -> np.ndarray:
        head = functools.partial(head_logits, config, 1.0, dtype=dtype)
        return -np.asarray(cross_entropy.target_statistics(head, x, matrix, targets).log_probs_M)

    exact, rounded = losses("float32"), losses("bfloat16")
    largest = float(jnp.abs(matmul(x, matrix)).max())
    assert 0 < np.abs(exact - rounded).max() <= 2 * largest * 2**-8
    assert abs(exact.mean() - rounded.mean()) < 1e-3 * exact.mean()


def test_gradient_of_a_float16_head_is_accumulated_in_float32() -> None:
    tokens, vocabulary = 1 << 17, 8
    x = jnp.ones((tokens, 2), jnp.float16)
    matrix = jnp.zeros((2, vocabulary), jnp.float16)
    targets = jnp.zeros(tokens, jnp.int32)

    def mean(matrix: jax.Array) -> jax.Array:
        return cross_entropy.summed_loss(head, x, matrix, targets) / tokens

    gradient = quick_jit(jax.grad(mean))(matrix)
    assert gradient.dtype == jnp.float16
    wanted = np.full((2, vocabulary), 1 / vocabulary)
    wanted[:, 0] -= 1
    np.testing.assert_array_equal(gradient, wanted)


def test_all_logits_never_exist_at_once() -> None:
    """By the compiler's memory analysis, with a limit of 1/16 of the bytes of all logits."""
    tokens, vocabulary = 1024, 16384
    x, matrix = random(tokens, 16, dtype="bfloat16"), random(16, vocabulary)
    targets = jnp.zeros(tokens, jnp.int32)

    def bytes_of(max_bytes: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(cross_entropy.LOGITS_BYTES, "cpu", max_bytes)
            patch.setattr(cross_entropy, "MIN_CHUNK_TOKENS", 64)
            loss = functools.partial(cross_entropy.summed_loss, head)
            gradient = jax.jit(lambda x, m: jax.grad(loss, (0, 1))(x, m, targets))
            analysis = gradient.lower(x, matrix).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)  # type: ignore[union-attr]

    all_logits = tokens * vocabulary * 4
    assert bytes_of(all_logits) > 0.9 * all_logits
    assert bytes_of(all_logits // 16) < 0.3 * all_logits


def test_a_gpu_layer_calls_cudnn_once_forward_and_once_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the program as lowered for CUDA, so that no GPU is needed."""
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{cudnn}.check_compute_capability", lambda _: True)
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    query, key = random(4, 128, 4, 64, dtype="bfloat16"), random(4, 128, 2, 64, dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [gpu])
        assert cudnn_attention.supports(query)
        assert not cudnn_attention.supports(query.astype(jnp.float32))
        assert not cudnn_attention.supports(random(1, 8, 1, 12, dtype="bfloat16"))
        gpu.compute_capability = "7.5"
        assert not cudnn_attention.supports(query)
    assert not cudnn_attention.supports(query)

    def loss(query: jax.Array, key: jax.Array) -> jax.Array:
        y = cudnn_attention.causal_attention(jnp.sin(query), key, key, Scoring(0.125, 64))
        return jnp.sin(y.astype(jnp.float32)).sum()

    def step(query: jax.Array, key: jax.Array) -> Any:
        layer = jax.checkpoint(loss, policy=save_marked)
        return collectives.psum(jax.value_and_grad(layer)(query, key), DATA)

    mesh, rows = mesh_of(2), PartitionSpec("data")
    sharded = jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=PartitionSpec())
    text = jax.jit(sharded).trace(query, key).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"__cudnn\$fmhaSoftmax(?!Backward)", text)) == 1
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 1

    def kept(query: jax.Array, key: jax.Array) -> Any:
        return jax.vjp(jax.checkpoint(loss, policy=save_marked), query, key)[1]

    sizes = [math.prod(array.shape) for array in jax.tree.leaves(jax.eval_shape(kept, query, key))]
    assert sizes.count(query.size) == 2  # the query and the result


@pytest.mark.long
def test_vocabulary_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 50 is padded to 128 rows, as on an accelerator."""
    run = RunConfig(model_config(vocab_size=50, tied_embeddings=True), train_config())
    tokens_ABS = np.random.default_rng(0).integers(0, 50, (2, 4, 9), dtype=np.int32)
    found = []
    for is_cpu in (True, False):  # rows are padded on accelerators only
        monkeypatch.setattr(sharding, "_is_cpu", lambda _, it=is_cpu: it)
        model, optimizer = create_model_and_optimizer(run, 10)
        step = make_train_step(run.train)
        for _ in range(3):
            result = step(model, optimizer, tokens_ABS[..., :-1], tokens_ABS[..., 1:])
        assert len(model.token_embedding.embedding[...]) == (50 if is_cpu else 128)
        logits_BSV = bind_and_jit(GPT.__call__, model)(tokens_ABS[0, :, :8])
        assert logits_BSV.shape == (4, 8, 50)
        weights = named_arrays(model, 50)
        found.append([result.losses_A, logits_BSV, *weights.values()])
    unpadded, padded = found
    assert_near(unpadded, padded, 1e-5)
