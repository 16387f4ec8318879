"""The config files of a run: `model.json`, and `train.json` or `reinforce.json`.

    model_config  every key of model.json: default, documentation, checks
    train_config  keys that only train.json has; most are in optimization_config
    reinforce_config  keys that only reinforce.json has; tasks, settings of the built-in ones
    optimization_config  keys that train.json and reinforce.json share
    sharding_config  how devices share the work
    base          the base class of all configs, and shared types
    option_values  defaults and choices of the commands' options
    run_config    reads and checks a run's two files, also against each other; compares configs;
                  keys that have no effect
    reference     generates the JSON schemas and docs/configuration.md

Defaults are defined here and nowhere else. A key's docstring is its description everywhere: in
errors, schemas and docs/configuration.md; after a change run `uv run config.py`."""
