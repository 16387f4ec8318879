"""Several runs in a row: `train.py --like RUN --grid KEY=VALUES --into FOLDER`.

    grid   a run for each combination of values, and what they come to

Imports every other package.
"""
