"""Model check: what must hold of a model before training.

checks            the eight checks and their table
checked_model     the model and batch that are checked
dead_parameters   parameters that receive no gradient
input_gradients   which tokens an output depends on
reachable_loss    the lowest loss that a model can reach on a batch
"""
