"""The compiled steps and the state they update.

objective   what a step minimizes; write one for another loss. Other data also needs a
            `Kind`: see `rungs/training/learner.py`
next_token  the objective of next-token training
preferences  the objectives of preferences: dpo, ipo, simpo
distillation  the objective of distillation, and a teacher's predictions
train_step  one global step: gradients of all microbatches, then one update; its `StepResult`
gradients   gradients of an objective, summed over microbatches and devices
shortcuts   skip padding, and the backward pass where gradients are 0
forward     forward passes on a mesh
eval_step   the validation loss
state       create model and optimizer on the mesh, or describe them without arrays
nonfinite   find NaN and infinity, and name the array"""
