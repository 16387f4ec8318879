"""The config files of a run: `model.json`, and `train.json` or `reinforce.json`.

    model_config  every key of model.json with its default, documentation and checks
    train_config  keys of train.json alone; most are in optimization_config
    reinforce_config  the same for reinforce.json
    optimization_config  the keys that these two share
    sharding_config  how devices share the work
    task_config   a task of reinforcement learning and the settings of the built-in ones
    base          what all have in common
    option_values  defaults and choices of the commands' options
    unused_keys   keys that a file sets although they have no effect
    run_config    reads the two files of a run, checks them, also against each other, compares them
    reference     generates the JSON schemas and docs/configuration.md

Defaults are defined here and nowhere else. Imports only `common`."""
