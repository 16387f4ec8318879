"""Several runs as one experiment: ladders, power laws, muP checks, learning-rate sweeps.

    ladder               run folders of growing compute
    widths               the same model at other widths
    scaled_runs, power_law   loss against compute, fitted
    coordinate_check     do activations keep their size as width grows (muP)
    learning_rate_sweep  train at several learning rates and widths

Imports the packages below `training`.
"""
