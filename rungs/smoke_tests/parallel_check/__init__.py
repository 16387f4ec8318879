"""Parallel check: train a run's first steps in every sharding mode and every accumulation split.

All cases start from the same weights and use the same sequences. They may differ only by rounding,
because sums are computed in another order.

    check          the cases that fit, and the training of one
    table          the table of all cases: how far each is from one device
    policy_check   the first step of a run of reinforcement learning on several meshes"""
