"""The checks that the scripts in `smoke_tests/` run on a machine, or on a run before training.

check             a row of the table that every check prints: a value, its limit, passed or not
short_run         a run cut to its first steps, sequences and tokens
device            are this machine's results correct, and as fast as they should be: all parts;
                  speed of matmuls, memory and links
device_step       the run's own step: time, memory, determinism, checkpoint
kernels           each kernel next to its plain form
model             is a model sound before training: the eight checks; the lowest reachable loss
checked_model     the model and batch to check
causality         which tokens an output depends on
dead_parameters   the gradient of a batch; parameters that receive none
parallel          does every sharding mode train like one device
parallel_policy   does reinforcement learning do so, too
resume            does a killed and resumed run end like an uninterrupted one"""
