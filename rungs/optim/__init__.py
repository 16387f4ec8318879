"""From gradients to an update: optimizers, learning-rate schedules, compute dtype.

    optimizer     the MultiSteps optimizer: clipping, weight decay, accumulation
    update_rules  one function per optimizer (adamw, muon, lion, adafactor, sgd); muP factors
    schedule      the learning rate of each step
    precision     which dtype a run computes in; float16 loss scale

Add an optimizer in `update_rules.py` and name it in `config/train_config.py`.
Imports `common`, `config`, `parallel` and `model`.
"""
