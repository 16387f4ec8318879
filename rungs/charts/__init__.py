"""Charts as PNG files: of one run, of several runs compared, of power laws, of muP experiments.

run_charts         draws the charts of one run: losses, learning rate, throughput; reward, pass@k
preference_charts  margins, accuracy and log-probabilities of preferences
layer_charts       what each layer did: over steps, over depth, head by head
drawer             the program that redraws them while training continues
comparison_charts  several runs compared, the power law, the coordinate check of muP, the
                   learning-rate sweep
drawing            the shared look: styles, colours, axes, writing to disk"""
