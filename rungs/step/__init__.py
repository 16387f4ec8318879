"""The compiled steps and the state they update.

    train_step    one global step: gradients of all microbatches, then one update; StepMetrics' data
    eval_step     the validation loss
    state         model and optimizer created on the mesh, or described in the abstract
    nonfinite     find NaN and infinity, and name the array

Imports `common`, `config`, `data`, `parallel`, `model` and `optim`.
"""
