"""Checks that users run on their own runs; the scripts in `smoke_tests/` call them.

    device_check/   does this machine compute what it should, and how fast
    model_check/    is a model sound before training: initial loss, causality, gradients, …
    parallel_check/ does every sharding mode train like one device
    resume_check/   does a run that is killed and resumed end like one that is not

Imports the packages below `training`.
"""
