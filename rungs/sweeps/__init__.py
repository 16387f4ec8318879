"""Several runs in a row: `train.py --like RUN --grid KEY=VALUES --into FOLDER`, `mup.py sweep`.

    grid   a run for each combination of values or each learning rate, and their results

Imports every other package."""
