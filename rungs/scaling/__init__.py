"""Experiments of several runs: ladders, power laws, muP checks, learning-rate sweeps.

ladder               model sizes for growing compute budgets; `plan.py --ladder`
power_law            loss against compute, fitted to recorded runs; `charts.py --power-law`
coordinate_check     muP's check that activations keep their size with width, `mup.py check`;
                     the same model at other widths
learning_rate_sweep  runs at several learning rates and the best one; `mup.py sweep`"""
