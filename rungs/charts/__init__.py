"""Pictures: one run, several runs compared, power laws, muP.

    drawing            the shared look: styles, colours, axes, writing to disk
    run_charts         charts of one run and of several; add a metric's chart here
    power_law_chart    loss against compute with the fitted line
    coordinate_chart, sweep_chart   muP

Imports `common`, `config`, `run` and `scaling`.
"""
