"""Reinforcement learning from verifiable rewards, as a run that resumes bit for bit.

    learner            the kind of run: open tasks, take a step, validate; what checkpoints record
    prompts            the prompts of each step and of validation
    sampling           completions of prompts, sampled and verified
    rollout_files      every sampled text, in files per step; samples.md
    policy_objective   the objective: advantages, the weight of each token; add a loss here
    policy_update      the updates of a step, and their arrays
    step_metrics       the metrics of a step, and of a validation: pass@k
    replay             run a recorded step again and compare
    audit              what a run is paid for

Tasks and verifiers are in `rungs/tasks`, start and loop in `rungs/training`, the sampler in
`rungs/model/rollouts.py`.

Imports the packages listed before it in `rungs/__init__.py`, except `huggingface` and `scaling`."""
