"""From gradients to an update: optimizers, learning-rate schedules, compute dtype.

    optimizers   one function per optimizer (adamw, muon, lion, adafactor, sgd), and muP's factors
    multi_steps  `MultiSteps` around them: gradient accumulation, clipping, weight decay
    schedule     the learning rate of each step
    precision    the dtype a run computes in; the loss scale of float16

To add an optimizer, add its name to `Optimizer` in `config/train_config.py` and a case to
`update_rule` in `optimizers.py`. To add a schedule, add its name to `Schedule` and a case in
`schedule.py`.
Imports `common`, `config`, `parallel` and `model`.
"""
