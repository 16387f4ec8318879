"""From gradients to an update: optimizers, learning-rate schedules, compute dtype.

    optimizers   one function per optimizer: adamw, muon, lion, adafactor, sgd; muP's factors
    skipping_optimizer  `SkippingOptimizer` around them: one update per step, none for a failed one;
                 clipping, weight decay, the moving average of the weights; state beside the weights
                 goes here and is saved with it
    expert_balance  biases that balance experts, in place of a loss
    schedule     the learning rate of each step: warm-up, then cosine, linear, constant or WSD
    precision    the compute dtype of a run; the loss scale of float16; the scales of FP8 matmuls

To add an optimizer, write its function in `optimizers.py` with `keeping_state`, and add it to
`BUILT_IN` there and to `BUILT_IN_OPTIMIZERS` in `config/optimization_config.py`; or declare it in a
package of your own as an entry point of the group `rungs.optimizers`. To add a schedule, add its
name to `Schedule` in `config/optimization_config.py` and a case in `schedule.py`; keys that it uses
or ignores are in `_KEYS_OF_SCHEDULES` in `config/run_config.py`."""
