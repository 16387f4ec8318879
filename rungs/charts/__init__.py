"""Charts as PNG files: of one run, of several runs compared, of power laws, of muP experiments.

    run_charts         draws the charts of one run; the losses of training
    policy_charts      reward, pass@k and the like of reinforcement learning
    preference_charts  margins, accuracy and log-probabilities of preferences
    drawer             the program that redraws them while training continues
    step_charts        charts of every kind of run: learning rate, gradient norm, throughput
    comparison_charts  charts that compare several runs
    scaling_charts     the power law, the coordinate check of muP, the learning-rate sweep
    drawing            the shared look: styles, colours, axes, writing to disk

Imports `common`, `config`, `data`, `run` and `scaling`."""
