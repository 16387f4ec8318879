"""The compiled steps and the state they update.

    train_step  one global step: gradients of all microbatches, then one update; its `StepResult`
    policy_step  the same for reinforcement learning
    compute     how a step computes: dtype, remat, loop over layers
    gradients   gradients of an objective, summed over microbatches and devices
    eval_step   the validation loss
    state       create model and optimizer on the mesh, or describe them without arrays
    nonfinite   find NaN and infinity, and name the array

The loss of a training step is the cross-entropy of `targets_ABS`; negative targets don't count. For
another loss write an `Objective` for `summed_gradients` in `gradients`, as `train_step` and
`policy_step` do.

Imports `common`, `config`, `data`, `parallel`, `model` and `optim`.
"""
