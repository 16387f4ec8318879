"""The config files of a run: `model.json`, and `train.json` or `reinforce.json`.

    model_config  every key of model.json: default, documentation, checks
    train_config  keys that only train.json has; most are in optimization_config
    reinforce_config  keys that only reinforce.json has
    optimization_config  keys that train.json and reinforce.json share
    sharding_config  how devices share the work
    task_config   a reinforcement learning task, and the settings of the built-in tasks
    base          the base class of all configs, and shared types
    option_values  defaults and choices of the commands' options
    unused_keys   keys that a file sets although they have no effect
    run_config    reads and checks a run's two files, also against each other; compares configs
    reference     generates the JSON schemas and docs/configuration.md

Defaults are defined here and nowhere else. Imports only `common`."""
