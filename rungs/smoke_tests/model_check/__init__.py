"""Model check: properties that a model must have before training.

checks          the eight checks and their table; the lowest loss that a model can reach
causality       which tokens an output depends on
gradients       the gradient of a batch; parameters that receive none
checked_model   the model and batch to check; the result of a check"""
