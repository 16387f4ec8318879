"""The compiled steps and the state they update.

    train_step  one global step: gradients of all microbatches, then one update; its `StepResult`
    eval_step   the validation loss
    state       create model and optimizer on the mesh, or describe them without arrays
    nonfinite   find NaN and infinity, and name the array

Imports `common`, `config`, `data`, `parallel`, `model` and `optim`.
"""
