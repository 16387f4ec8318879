"""The two config files of a run, `model.json` and `train.json`: keys, defaults and checks.

    model_config  every key of model.json with its default, documentation and checks
    train_config  the same for train.json
    task_config   a task of reinforcement learning and the settings of the built-in ones
    base          what the two have in common
    cross_checks  checks of train.json against model.json
    unused_keys   keys that a file sets although they have no effect
    run_config    reads, checks and compares both files
    reference     generates the JSON schemas and docs/configuration.md

Defaults are defined here and nowhere else. Imports only `common`.
"""
