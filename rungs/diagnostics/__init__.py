"""What the smoke tests call: checks of a user's own run.

    model_check/     a model as training starts: initial loss, causality, gradients, overfitting
    parallel_check/  the same step in every sharding mode
    resume_check/    a training killed and resumed, compared with one that was not

Imports the packages below `training`.
"""
