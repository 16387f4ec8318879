"""Parallel check: train a run's first steps in every sharding mode and every accumulation split,
with the same weights and sequences. Results may differ only by rounding, from the order of sums.

    check          the cases that fit, and training one
    table          the table of all cases: differences from one device
    policy_check   the first step of a reinforcement learning run on several meshes"""
