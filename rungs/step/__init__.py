"""The compiled steps and the state they update.

    train_step  one global step: gradients of all microbatches, then one update; its `StepResult`
    eval_step   the validation loss
    state       create model and optimizer on the mesh, or describe them without arrays
    nonfinite   find NaN and infinity, and name the array

The loss of a step is the cross-entropy of `targets_ABS`; negative targets don't count. For another
loss change `objective` in `train_step`; `GPT.weighted_loss` in `rungs/model/gpt.py` has a weight
for each token, as a policy gradient needs.

Imports `common`, `config`, `data`, `parallel`, `model` and `optim`.
"""
