"""Wrong answers, and what the tests say about each. Not among the tests that run by themselves:

    uv run pytest assignment/systems/tests/wrong_answers.py

A wrong answer is the solution with one piece of its text replaced, as a student might have it."""

import importlib
from typing import Any

import numpy as np
import pytest

from assignment.tests.blanks import ASSIGNMENT, Part

LOCAL = "test_local_gradients_are_of_ones_own_rows"
ACCUMULATED = "test_accumulated_gradients_are_the_sum_over_microbatches"
MEAN = "test_all_reduce_mean_counts_rows_and_not_devices"
ONE_DEVICE = "test_data_parallel_training_is_that_of_one_device"
SENT_ONCE = "test_data_parallel_gradients_are_sent_once"
VARYING = 'jax.lax.pcast(params, DATA, to="varying")'
TOTAL = "total, count = jax.lax.psum((summed, counted_B.sum()), DATA)"
DIVIDE = "jax.tree.map(lambda a: a / count, total)"
VALUE = "value, gradients = all_reduce_mean(summed, batch.counted_B)"
ONCE, TWICE = {"microbatches": 1}, {"microbatches": 2}

REDUCE_SCATTER = "test_reduce_scatter_gives_each_device_its_part_of_the_sum"
ALL_GATHER = "test_all_gather_gives_everyone_all_parts_in_order"
ALL_REDUCE = "test_all_reduce_is_both_after_each_other"
RING, ZERO = "test_bytes_sent_in_a_ring", "test_zero_training_is_that_of_one_device"
AG, AR = ({"collective": name, "times": n} for name, n in (("all-gather", 1), ("all-reduce", 2)))

SPLIT = "test_split_gives_each_device_a_part_of_every_layer"
GATHER = "test_gather_joins_parts_and_sums_their_gradients"
FSDP_MEMORY = "test_fsdp_forward_needs_no_more_than_some_layers"
FSDP = "test_fsdp_training_is_that_of_one_device"
SCAN = "return jax.lax.scan(gathered_layer, x_BD, parts)[0]"

MERGE, OVERFLOW = "test_merge_is_what_all_keys_at_once_give", "test_merge_does_not_overflow"
HIDDEN = "test_merge_of_hidden_keys_changes_nothing"
FORWARD, BITS = (
    "test_flash_forward_attends_to_earlier_positions",
    "test_flash_forward_of_16_bits_sums_in_32",
)
BACKWARD, BOTH = "test_flash_backward_has_the_right_gradients", "test_attention_has_both_passes"
MASK = "(own * size + position)[:, None] >= block * size + position"

BYTES = "test_temporary_bytes_are_counted_without_computing"
EACH, SEGMENTS = "test_each_layer_again_keeps_inputs_alone", "test_segments_again_keep_few_inputs"
KEPT = "test_matmuls_kept_are_not_computed_again"
EACH_LAYER = """
    @jax.checkpoint
    def again(x_BD: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return layer(weights, x_BD), None

    return jax.lax.scan(again, x_BD, weights)[0]
"""
PLAIN_LAYER = EACH_LAYER.replace("    @jax.checkpoint\n", "")

UNDERFLOW = "test_scaled_gradients_do_not_underflow"
FINITE = "test_all_finite_looks_at_every_number"
NEXT = "test_next_scale"
SMALL, SAME = "test_mixed_steps_keep_small_updates", "test_mixed_steps_are_those_of_32_bits"
SKIPPED = "test_mixed_steps_that_are_not_finite_change_nothing"
BAD = {"bad": np.inf}
CHOICE = """jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), updated, (params, moments)
    )"""


ANEW = {"scale": 1024, "steps": 3, "is_finite": False, "expected": (512, 0), "why": "anew"}
SMALLEST = {"scale": 1, "steps": 0, "is_finite": False, "expected": (1, 0), "why": "below 1"}
ALL_FINITE = """\
    return jnp.array([jnp.isfinite(array).all() for array in jax.tree.leaves(tree)]).all()"""

CALL = "test_seconds_per_call_are_the_median_of_what_is_waited_for"
WARM_UP = "test_seconds_per_call_wait_for_the_warm_up"
STEP = "test_seconds_per_step_wait_for_the_last_one"
NEIGHBOURS, UNDISTURBED = "test_speedup_is_that_of_neighbours", "test_speedup_is_not_disturbed"
WAITED = """    jax.block_until_ready(function(*arguments))
    return clock() - start"""
MEDIAN = "statistics.median(_seconds(function, arguments, clock) for _ in range(calls))"
RATIOS = """    ratios = [
        _seconds(before, arguments, clock) / _seconds(after, arguments, clock)
        for _ in range(rounds)
    ]
    return statistics.median(ratios)"""

WRONG: dict[str, list[tuple[Any, ...]]] = {
    "data_parallel": [
        (VARYING, "params", LOCAL, "You wrote no psum"),
        (
            f"return jax.value_and_grad(loss)({VARYING}, batch)",
            """value, gradients = jax.value_and_grad(loss)(params, batch)
    summed = jax.lax.psum(jax.lax.pcast(gradients, DATA, to="varying"), DATA)
    return value, jax.lax.pcast(summed, DATA, to="varying")""",
            LOCAL,
            "your psum sums these sums",
        ),
        (
            f"return jax.value_and_grad(loss)({VARYING}, batch)",
            f"return jax.lax.pmean(jax.value_and_grad(loss)({VARYING}, batch), DATA)",
            LOCAL,
            "communication comes later",
        ),
        (
            f"return jax.value_and_grad(loss)({VARYING}, batch)",
            f"value, gradients = jax.value_and_grad(loss)({VARYING}, batch)\n"
            "    return jax.tree.map(lambda a: a / batch.counted_B.sum(), (value, gradients))",
            LOCAL,
            "no device knows yet how many rows the others have",
        ),
        (
            "jax.tree.map(jnp.add, total, local_gradients(loss, params, part))",
            "local_gradients(loss, params, part)",
            ACCUMULATED,
            "only the last microbatch",
        ),
        (
            "jax.tree.map(jnp.add, total, local_gradients(loss, params, part)), None",
            "((got := local_gradients(loss, params, part))[0] + total[0], got[1]), None",
            ACCUMULATED,
            "the gradients of the last alone",
        ),
        (
            "jax.tree.map(jnp.add, total, local_gradients(loss, params, part)), None",
            "((g := local_gradients(loss, params, part))[0],"
            " jax.tree.map(jnp.add, total[1], g[1])), None",
            ACCUMULATED,
            "the loss of the last alone",
        ),
        (
            "return jax.lax.scan(add, local_gradients(loss, params, first), rest)[0]",
            "total = jax.lax.scan(add, local_gradients(loss, params, first), rest)[0]\n"
            "    return jax.tree.map(lambda a: a / microbatches, total)",
            ACCUMULATED,
            "the mean over microbatches",
        ),
        (
            "    parts = jax.tree.map(",
            "    return local_gradients(loss, params, batch)\n    parts = jax.tree.map(",
            ACCUMULATED,
            "activations of all microbatches",
        ),
        (VARYING, "params", ACCUMULATED, "sent once for every microbatch"),
        (DIVIDE, "total", MEAN, "not divided by the number of rows that count"),
        (
            TOTAL,
            "total, count = jax.lax.psum(summed, DATA), counted_B.sum()",
            MEAN,
            "sum the numbers, too",
        ),
        (TOTAL, "total, count = summed, counted_B.sum()", MEAN, "nothing is summed"),
        (
            TOTAL,
            "total, count = jax.lax.pmean(summed, DATA), 1",
            MEAN,
            "divided by the number of devices",
        ),
        (
            TOTAL,
            "total, count = jax.lax.psum((summed, counted_B.size), DATA)",
            MEAN,
            "divided by all rows",
        ),
        (
            TOTAL,
            "summed = jax.tree.map(lambda a: a / counted_B.sum(), summed)\n"
            "    total, count = jax.lax.pmean(summed, DATA), 1",
            MEAN,
            "the mean of the devices' means",
        ),
        (
            TOTAL,
            f"summed = jax.tree.map(lambda a: a / counted_B.sum(), summed)\n    {TOTAL}",
            MEAN,
            "divided twice",
        ),
        (
            VALUE,
            f"{VALUE.partition(' = ')[0]} = summed",
            ONE_DEVICE,
            "no psum: what the step",
            ONCE,
        ),
        (
            "summed = accumulated_gradients(loss, params, batch, microbatches)",
            "summed = jax.value_and_grad(loss)(params, batch)",
            ONE_DEVICE,
            "4 times too large: summed twice",
            ONCE,
        ),
        (
            VALUE,
            f"{VALUE}\n        gradients = jax.lax.pmean(gradients, DATA)"
            "\n        gradients = jax.tree.map(lambda g: g / 4, gradients)",
            ONE_DEVICE,
            "4 times too small",
            TWICE,
        ),
        (
            "params, batch, microbatches)\n        value",
            "params, batch, 1)\n        value",
            SENT_ONCE,
            "more rows than a microbatch",
        ),
        (
            f"summed = accumulated_gradients(loss, params, batch, microbatches)\n        {VALUE}",
            """parts = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)
        each = jax.lax.map(
            lambda part: jax.lax.psum(local_gradients(loss, params, part), DATA), parts
        )
        count = jax.lax.psum(batch.counted_B.sum(), DATA)
        value, gradients = jax.tree.map(lambda a: a.sum(0) / count, each)""",
            SENT_ONCE,
            "4 times the bytes of the gradients",
        ),
    ],
    "collectives": [
        (
            "parts[(own - 1) % devices]\n    for hop in range(2, devices + 1)",
            "parts[own]\n    for hop in range(1, devices)",
            REDUCE_SCATTER,
            r"part i \+ 1",
        ),
        (
            "_to_next(total) + parts[(own - hop) % devices]",
            "total + _to_next(parts[(own - hop) % devices])",
            REDUCE_SCATTER,
            "Not equal to tolerance",
        ),
        (
            "    parts = x.reshape(devices, -1, *x.shape[1:])\n    total",
            "    return jax.lax.psum_scatter(x, DATA, tiled=True)\n    total",
            REDUCE_SCATTER,
            "written with jax.lax.ppermute",
        ),
        (
            "    parts = x.reshape(devices, -1, *x.shape[1:])\n    total",
            """    total = sent = x
    for _ in range(devices - 1):
        sent = _to_next(sent)
        total = total + sent
    return total.reshape(devices, -1, *x.shape[1:])[own]
    total""",
            REDUCE_SCATTER,
            "whole arrays around the ring",
        ),
        (
            "return parts.reshape(-1, *part.shape[1:])",
            "return parts",
            ALL_GATHER,
            "joined along their first axis",
        ),
        (
            "parts = parts.at[(own - hop) % devices].set(part)",
            "parts = parts.at[(own + hop) % devices].set(part)",
            ALL_GATHER,
            "Not equal to tolerance",
        ),
        (
            "    return parts.reshape(-1, *part.shape[1:])",
            "    return jnp.roll(parts[::-1], own + 1, axis=0).reshape(-1, *part.shape[1:])",
            ALL_GATHER,
            "in which they arrived",
        ),
        (
            "return all_gather(reduce_scatter(x))",
            "return jax.lax.psum(x, DATA)",
            ALL_REDUCE,
            "written with jax.lax.ppermute",
        ),
        (
            "return all_gather(reduce_scatter(x))",
            """total = sent = x
    for _ in range(3):
        sent = _to_next(sent)
        total = total + sent
    return total""",
            ALL_REDUCE,
            "whole arrays around the ring",
        ),
        ("* (devices - 1) / devices", "", RING, "one part is never sent", AG),
        ("* (devices - 1) / devices", "* (devices - 1)", RING, "N times too much", AG),
        ('"all-reduce": 2}', '"all-reduce": 1}', RING, "twice as much as each", AR),
        ("/ count, gradients)", ", gradients)", ZERO, "summed but not divided"),
        ("reduce_scatter(g) / count", "reduce_scatter(g) / count / 4", ZERO, "divided twice"),
        (
            "return jax.tree.map(all_gather, params), moments",
            "return params, moments",
            ZERO,
            "Gather",
        ),
        ("check_vma=False", "check_vma=True", ZERO, "believes out_specs"),
        (
            "lambda g: reduce_scatter(g) / count",
            "lambda g: _own_part(jax.lax.psum(g, DATA)) / count",
            "test_zero_sends_no_more_than_an_all_reduce",
            "gradients are all-reduced",
        ),
        (
            "lambda g: reduce_scatter(g) / count",
            "lambda g: _own_part(g) / count",
            ZERO,
            "tolerance",
        ),
    ],
    "fsdp": [
        ("PARTS = PartitionSpec(None, DATA)", "PARTS = PartitionSpec()", SPLIT, "has all of"),
        (
            "jax.device_put(params, NamedSharding(mesh, PARTS))",
            "jax.device_put(params, NamedSharding(mesh, PartitionSpec(None, None, DATA)))",
            SPLIT,
            "split the second axis",
        ),
        ("axis=0, tiled=True", "axis=0", GATHER, "stacked, not joined"),
        ("axis=0, tiled=True", "axis=1, tiled=True", GATHER, "join them along axis 0"),
        (
            "jax.lax.all_gather(w, DATA, axis=0, tiled=True)",
            """jax.lax.dynamic_update_slice_in_dim(
            jax.lax.stop_gradient(jax.lax.all_gather(w, DATA, axis=0, tiled=True)),
            w, jax.lax.axis_index(DATA) * len(w), 0)""",
            GATHER,
            "only what this device's own rows say",
        ),
        ("    @jax.checkpoint\n", "", FSDP_MEMORY, "gather them again"),
        (
            SCAN,
            """for up, down in zip(parts["up"], parts["down"], strict=True):
        x_BD, _ = gathered_layer(x_BD, {"up": up, "down": down})
    return x_BD""",
            FSDP_MEMORY,
            "a Python loop over layers",
        ),
        (
            SCAN,
            """whole = jax.vmap(gather)(parts)
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x_BD, whole)[0]""",
            FSDP_MEMORY,
            "not all before it",
        ),
        (
            "lambda g: g / count, gradients)",
            "lambda g: jax.lax.psum(g, DATA) / count, gradients)",
            FSDP,
            "parts are summed",
        ),
        (
            "lambda g: g / count, gradients)",
            "lambda g: jax.lax.pmean(g, DATA) / count, gradients)",
            FSDP,
            "parts are averaged",
        ),
        ("lambda g: g / count", "lambda g: g / 4 / count", FSDP, "divided twice"),
        (
            "value, count = jax.lax.psum((value, batch.counted_B.sum()), DATA)",
            "count = jax.lax.psum(batch.counted_B.sum(), DATA)",
            FSDP,
            "each device's own",
        ),
    ],
    "flash_attention": [
        ("seen.total_Q * shrink_Q", "seen.total_Q", MERGE, "multiply the total, too, by exp"),
        (
            "seen.output_QH * shrink_Q[:, None]",
            "seen.output_QH",
            MERGE,
            "multiply the output, too,",
        ),
        (
            "largest_Q = jnp.maximum(seen.largest_Q, scores_QK.max(axis=1))",
            "largest_Q = jnp.zeros_like(seen.largest_Q)",
            OVERFLOW,
            "1000 give NaN or infinity",
        ),
        ("jnp.where(largest_Q == -jnp.inf, 0, largest_Q)", "largest_Q", HIDDEN, "Subtract 0 where"),
        ("/ math.sqrt(width)\n\n    def attend", "\n\n    def attend", FORWARD, "by √H"),
        (MASK, "(position)[:, None] >= position", FORWARD, "used in every block"),
        (MASK, MASK.replace(">=", ">"), FORWARD, "attends to itself, too"),
        ("fori_loop(0, own + 1", "fori_loop(own, own + 1", FORWARD, "only to those in"),
        (
            "fori_loop(0, own + 1",
            "fori_loop(0, pl.num_programs(0)",
            "test_flash_forward_leaves_later_blocks_unread",
            "save half the work",
        ),
        (
            "(seen.output_QH / seen.total_Q[:, None])",
            "seen.output_QH",
            FORWARD,
            "not divided by the total",
        ),
        ("seen.largest_Q + jnp.log", "jnp.log", FORWARD, "add it to the logarithm"),
        (
            "merge(seen, scores_QK, value_ref[keys, :].astype(jnp.float32))",
            "jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32),"
            " merge(seen, scores_QK, value_ref[keys, :].astype(jnp.float32)))",
            BITS,
            "sums over many keys lose digits",
        ),
        (
            "    length, width = query_SH.shape\n    own_rows",
            """    length, width = query_SH.shape
    scores = query_SH @ key_SH.T / math.sqrt(width)
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    return jax.nn.softmax(scores) @ value_SH, jax.nn.logsumexp(scores, axis=1)
    own_rows""",
            "test_flash_forward_never_has_all_scores",
            "one block of keys at a time",
        ),
        (
            "lambda block: (block, 0))\n",
            "lambda _: (0, 0))\n",
            FORWARD,
            "Not equal to tolerance|NaN",
        ),
        ("(of_weights_SK - of_softmax_S[:, None])", "of_weights_SK", BACKWARD, "lacks a part"),
        (
            "(of_weights_SK - of_softmax_S[:, None]) * scale",
            "(of_weights_SK - of_softmax_S[:, None])",
            BACKWARD,
            "lack the factor",
        ),
        (
            "return query_gradient_SH + of_scores_SK @ keys_KH",
            "return of_scores_SK @ keys_KH",
            BACKWARD,
            "add them up",
        ),
        (
            "jnp.where(is_seen_SK, jnp.exp(scores_SK - log_sum_S[:, None]), 0)",
            "jnp.exp(scores_SK - log_sum_S[:, None])",
            BACKWARD,
            "mask them here, too",
        ),
        (
            "blocks = jax.tree.map(",
            "block_size = length\n    blocks = jax.tree.map(",
            "test_flash_backward_never_has_all_weights",
            "one block of keys at a time",
        ),
        (
            "@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))\n",
            "def _plain(f):\n    f.defvjp = lambda *_: None\n    return f\n\n\n@_plain\n",
            BOTH,
            "jax.custom_vjp gives it one",
        ),
        (
            "return output_SH, (query_SH, key_SH",
            "return output_SH, (query_SH, query_SH",
            BOTH,
            "Not equal to tolerance",
        ),
        (".astype(dtype) for", " for", BACKWARD, "have the dtype of what they are"),
    ],
    "remat": [
        (".temp_size_in_bytes", ".argument_size_in_bytes", BYTES, "arguments are counted alone"),
        (
            "return analysis.temp_size_in_bytes",
            "return analysis.temp_size_in_bytes + analysis.argument_size_in_bytes",
            BYTES,
            "arguments are counted as well",
        ),
        (
            "analysis: Any = jax.jit(function)",
            "function(*arguments)\n    analysis: Any = jax.jit(function)",
            BYTES,
            "call nothing",
        ),
        (EACH_LAYER, PLAIN_LAYER, EACH, "as without jax.checkpoint"),
        (
            EACH_LAYER,
            EACH_LAYER.replace(
                "return jax.lax.scan(again, x_BD, weights)[0]",
                """for up, down in zip(weights["up"], weights["down"], strict=True):
        x_BD, _ = again(x_BD, {"up": up, "down": down})
    return x_BD""",
            ),
            EACH,
            "a Python loop over layers",
        ),
        (
            EACH_LAYER,
            """
    def all_layers(x_BD, weights):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x_BD, weights)[0]

    return jax.checkpoint(all_layers)(x_BD, weights)
""",
            EACH,
            "around the whole loop saves nothing",
        ),
        (
            EACH_LAYER,
            EACH_LAYER.replace(
                "@jax.checkpoint",
                "@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)",
            ),
            EACH,
            "more than these is kept",
        ),
        (
            "    parts = jax.tree.map(",
            "    return each_layer_again(weights, x_BD)\n    parts = jax.tree.map(",
            SEGMENTS,
            "inputs of all 256 layers are kept",
        ),
        (
            "return each_layer_again(weights, x_BD), None",
            "return jax.lax.scan(lambda x, w: (layer(w, x), None), x_BD, weights)[0], None",
            SEGMENTS,
            "all activations of its layers are kept",
        ),
        ("dots_saveable", "everything_saveable", KEPT, "tanh is kept as well"),
        ("dots_saveable", "nothing_saveable", KEPT, "the policy must let"),
    ],
    "mixed_precision": [
        (
            "array.astype(jnp.float16) if is_float else array",
            "array.astype(jnp.float16)",
            "test_to_half_turns_floats_and_nothing_else",
            "tokens became floats",
        ),
        (
            "return array.astype(jnp.float16) if is_float else array",
            "return array.astype(jnp.bfloat16) if is_float else array",
            "test_to_half_turns_floats_and_nothing_else",
            "bfloat16",
        ),
        ("return value * scale, value", "return value, value", UNDERFLOW, "are 0"),
        (
            "g.astype(jnp.float32) / scale",
            "g.astype(jnp.float32)",
            UNDERFLOW,
            "still have the scale",
        ),
        (
            "g.astype(jnp.float32) / scale",
            "(g / scale.astype(g.dtype)).astype(jnp.float32)",
            UNDERFLOW,
            "turn gradients into float32 before you divide",
        ),
        ("g.astype(jnp.float32) / scale", "g / scale.astype(g.dtype)", UNDERFLOW, "float32 first"),
        (
            "return value * scale, value",
            "return value * scale, value * scale",
            UNDERFLOW,
            "loss still",
        ),
        (
            "jax.grad(scaled, has_aux=True)(to_half(params))",
            "jax.grad(scaled, has_aux=True)(params)",
            UNDERFLOW,
            "both go through to_half",
        ),
        (
            "return value * scale, value",
            "value = loss(half, to_half(batch)) * scale.astype(jnp.float16)\n"
            "        return value.astype(jnp.float32), value.astype(jnp.float32) / scale",
            "test_scaled_gradients_of_a_loss_in_16_bits_do_not_overflow",
            "too large for float16",
        ),
        (
            ALL_FINITE,
            "    return jnp.isfinite(sum(array.sum() for array in jax.tree.leaves(tree)))",
            FINITE,
            "Their sum is not",
        ),
        ("jnp.isfinite(array).all()", "~jnp.isnan(array).any()", FINITE, "inf in a.* is not seen"),
        (
            ALL_FINITE,
            "    return all(jnp.isfinite(array).all() for array in jax.tree.leaves(tree))",
            FINITE,
            "inside jax.jit there is no number yet",
        ),
        (
            "before.finite_steps + 1, 0)",
            "before.finite_steps + 1, before.finite_steps)",
            NEXT,
            "anew",
            ANEW,
        ),
        (
            "jnp.maximum(before.scale * factor, 1.0)",
            "before.scale * factor",
            NEXT,
            "below 1",
            SMALLEST,
        ),
        (
            "updated = sgd(params, moments, gradients)",
            "gradients = jax.tree.map(lambda g: g * is_finite, gradients)\n"
            "    updated = sgd(params, moments, gradients)\n    return *updated, scale, value",
            SKIPPED,
            "To multiply the gradient by 0 is no way out",
            BAD,
        ),
        (
            f"params, moments = {CHOICE}",
            "params = jax.tree.map(\n"
            "        lambda new, old: jnp.where(is_finite, new, old), updated[0], params\n    )\n"
            "    moments = updated[1]",
            SKIPPED,
            "moments are not finite",
            BAD,
        ),
        (
            "updated = sgd(params, moments, gradients)",
            "gradients = jax.tree.map(lambda g: jnp.where(is_finite, g, 0), gradients)\n"
            "    updated = sgd(params, moments, gradients)\n"
            "    return *updated, next_scale(scale, is_finite), value",
            SKIPPED,
            "weights moved by the old moments",
            BAD,
        ),
        ("next_scale(scale, is_finite), value", "scale, value", SKIPPED, "halve it", BAD),
        (
            "updated = sgd(params, moments, gradients)",
            "updated = sgd(to_half(params), moments, to_half(gradients))\n"
            "    updated = jax.tree.map(lambda a: a.astype(jnp.float32), to_half(updated))",
            SMALL,
            "is lost",
        ),
        (
            "scaled_gradients(loss, params, batch, scale.scale)\n",
            "scaled_gradients(loss, params, batch, scale.scale)\n"
            "    gradients = jax.tree.map(lambda g: g * scale.scale, gradients)\n",
            SAME,
            "still have the scale",
        ),
    ],
    "measuring": [
        (
            WAITED,
            WAITED.replace("jax.block_until_ready(function(*arguments))", "function()"),
            CALL,
            "how long it takes to hand over",
        ),
        (
            "    jax.block_until_ready(function(*arguments))\n    return stat",
            "    return stat",
            CALL,
            "belongs to the warm-up",
        ),
        (MEDIAN, MEDIAN.replace("median", "mean"), CALL, "the mean: one call was disturbed"),
        (MEDIAN, MEDIAN.replace("statistics.median", "min"), CALL, "the smallest"),
        (
            WAITED,
            WAITED.replace(
                "jax.block_until_ready(function(*arguments))",
                "function(*arguments).block_until_ready()",
            ),
            CALL,
            "waits for all arrays of a tree",
        ),
        (
            "    jax.block_until_ready(function(*arguments))\n    return stat",
            "    function(*arguments)\n    return stat",
            WARM_UP,
            "the work of the warm-up is measured",
        ),
        (
            f"    jax.block_until_ready(function(*arguments))\n    return {MEDIAN}",
            "    start = clock()\n    function(*arguments)\n    return clock() - start",
            WARM_UP,
            "and this is how long it takes to hand over",
        ),
        (
            "        state = step(state)",
            "        state = jax.block_until_ready(step(state))",
            STEP,
            "this waits for every step",
        ),
        ("    jax.block_until_ready(state)\n", "", STEP, "how long it takes to hand over"),
        ("state = jax.block_until_ready(step(state))\n", "\n", STEP, "the first step compiles"),
        (
            "state = jax.block_until_ready(step(state))\n",
            "state = step(state)\n",
            STEP,
            "still being computed",
        ),
        (
            "        state = step(state)\n    jax",
            "        step(state)\n    jax",
            "test_seconds_per_step_hand_the_state_on",
            "each step gets what the one before",
        ),
        (
            RATIOS,
            """    slow, fast = (
        statistics.median(_seconds(function, arguments, clock) for _ in range(rounds))
        for function in (before, after)
    )
    return slow / fast""",
            NEIGHBOURS,
            "Take turns",
        ),
        (
            "return statistics.median(ratios)",
            "return statistics.mean(ratios)",
            UNDISTURBED,
            "the mean of ratios",
        ),
        (
            "_seconds(before, arguments, clock) / _seconds(after, arguments, clock)",
            "1 / (_seconds(before, arguments, clock) / _seconds(after, arguments, clock))",
            UNDISTURBED,
            "½ means half as fast",
        ),
    ],
}
"""By part: what is replaced, by what, the test, a part of what it says, and its other arguments."""


@pytest.mark.parametrize(
    ("part", "right", "wrong", "test", "says", "arguments"),
    [
        pytest.param(part, *wrong[:4], *(wrong[4:] or ({},)), id=wrong[2].removeprefix("test_"))
        for part, answers in WRONG.items()
        for wrong in answers
    ],
)
def test_a_wrong_answer_is_told_why(
    part: str, right: str, wrong: str, test: str, says: str, arguments: dict[str, Any]
) -> None:
    tests = importlib.import_module(f"assignment.systems.tests.test_{part}")
    code = Part(ASSIGNMENT / "systems", part).wrong_answer(right, wrong)
    with pytest.raises(AssertionError, match=says):
        getattr(tests, test)(code, **arguments)
