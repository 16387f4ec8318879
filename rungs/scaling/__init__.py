"""Experiments of several runs: ladders, power laws, muP checks, learning-rate sweeps.

ladder     model sizes for growing compute budgets; `plan.py --ladder`
power_law  loss against compute, fitted to recorded runs; `charts.py --power-law`
mup        muP's coordinate check, the same model at other widths, learning-rate sweeps"""
