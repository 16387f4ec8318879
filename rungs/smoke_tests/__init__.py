"""The checks that the scripts in `smoke_tests/` run on a machine, or on a run before training.

device_check/     are this machine's results correct, and how fast are they
model_check/      is a model sound before training: initial loss, causality, gradients, …
parallel_check/   does every sharding mode train like one device
resume_check/     does a killed and resumed run end like an uninterrupted one"""
