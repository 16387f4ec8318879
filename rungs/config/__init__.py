"""The config files of a run: `model.json`, and `train.json` or `reinforce.json`.

    model_config  every key of model.json: default, documentation, checks
    train_config  keys of train.json that reinforce.json lacks
    reinforce_config  keys of reinforce.json that train.json lacks; tasks and their settings
    optimization_config  keys that train.json and reinforce.json share
    latent_config  latent_attention in model.json
    routing_config  expert_routing there: how tokens are given to experts
    sharding_config  how devices share the work
    base          the base class of all configs, and shared types
    option_values  defaults and choices of the commands' options
    run_config    reads and checks a run's two files, also against each other; compares configs;
                  keys that have no effect
    reference     generates the JSON schemas and docs/configuration.md

A key that changes which tokens are validated on also goes into `describe_validation` in
`data/provenance.py`, or `best` would compare losses of different data.

Defaults are defined here and nowhere else. A key's docstring is its description everywhere: in
errors, schemas and docs/configuration.md; after a change run `uv run config.py`."""
