"""Charts as PNG files: of one run, of several runs compared, of power laws, of muP experiments.

    run_charts         draws the charts of one run
    drawer             the program that redraws them while training continues
    loss_chart         losses of training
    policy_charts      reward, pass@k and the like of reinforcement learning
    step_charts        charts of both kinds of runs: learning rate, gradient norm, throughput
    comparison_charts  charts that compare several runs
    power_law_chart    loss against compute with the fitted line
    mup_charts         the coordinate check and the learning-rate sweep
    drawing            the shared look: styles, colours, axes, writing to disk

Imports `common`, `config`, `data`, `run` and `scaling`.
"""
