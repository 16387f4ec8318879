"""Parallel check: train a run's first steps in every sharding mode and every accumulation split.

All cases start from the same weights and use the same sequences. They may differ only by rounding,
because sums are computed in another order.

check        the cases that fit, and the training of one
comparison   how far a case's result is from that of one device
recorder     an optimizer that keeps the gradient
table        the table of all cases
"""
