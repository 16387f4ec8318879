"""Several runs in a row: `train.py --like RUN --grid KEY=VALUES --into FOLDER`, `mup.py sweep`.

    grid   one run per combination of values or learning rate, and their results

Imports every other package."""
