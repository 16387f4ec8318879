"""pass@k: how often at least one of k completions is correct."""

import math

import numpy as np


def mean_pass_at_k(correct_PG: np.ndarray, k: int) -> float:
    """Return the mean over prompts of an unbiased estimate of pass@k: 1 − C(n − c, k) ÷ C(n, k) for
    c correct ones of n completions (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Args:
        correct_PG: whether each of G completions of P prompts is correct.
        k: at most G.

    Raises:
        ValueError: k is larger than G.
    """
    samples = correct_PG.shape[1]
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} completions of each prompt, not {samples}")
    wrong_P = (~correct_PG.astype(bool)).sum(axis=1)
    all_wrong = [math.comb(int(wrong), k) / math.comb(samples, k) for wrong in wrong_P]
    return 1 - math.fsum(all_wrong) / len(all_wrong)
