"""Resume check: compare a training that is killed and resumed with an uninterrupted one.

check   train both, compare them, print the tables
kill    start training processes and kill them at random moments
"""
