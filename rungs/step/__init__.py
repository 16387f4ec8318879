"""The compiled steps and the state they update.

objective   what a step minimizes: the protocol; `rungs/objectives` has the objectives
train_step  one global step: gradients of all microbatches, then one update; its `StepResult`
gradients   gradients of an objective, summed over microbatches and devices
shortcuts   skip padding, and the backward pass where gradients are 0
forward     forward passes on a mesh
eval_step   the validation loss
state       create model and optimizer on the mesh, or describe them without arrays
nonfinite   find NaN and infinity, and name the array"""
