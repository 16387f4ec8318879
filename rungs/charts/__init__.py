"""Charts as PNG files: of one run, of several runs compared, of power laws, of muP experiments.

    run_charts         charts of one run; add the chart of a new metric here
    comparison_charts  charts that compare several runs
    power_law_chart    loss against compute with the fitted line
    mup_charts         the coordinate check and the learning-rate sweep
    drawing            the shared look: styles, colours, axes, writing to disk

Imports `common`, `config`, `run` and `scaling`.
"""
