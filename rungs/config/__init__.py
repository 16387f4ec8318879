"""The two files of a run, `model.json` and `train.json`: their keys, defaults and checks.

    model_config  every key of model.json, with its default and documentation
    train_config  every key of train.json
    base          what both types share
    cross_checks  what train.json asks of a model that model.json does not provide
    run_config    both files read, checked together and compared
    reference     JSON schemas and docs/configuration.md, generated

The only place where a default stands. Imports only `common`.
"""
