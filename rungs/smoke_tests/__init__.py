"""The checks that the scripts in `smoke_tests/` run on a machine, or on a run before training.

    device_check/     does this machine compute what it should, and how fast
    model_check/      is a model sound before training: initial loss, causality, gradients, …
    parallel_check/   does every sharding mode train like one device
    resume_check/     does a run that is killed and resumed end like one that is not

Imports the packages below `charts` and `page`."""
