"""Reinforcement learning from verifiable rewards, as a run that resumes bit for bit.

    learner            the kind of run: open tasks, take a step, validate
    prompts            the prompts of each step and of validation
    sampling           completions of prompts, sampled and verified
    verification       verdicts on the completions, from one process for all
    rollout_files      every sampled text, in files per step
    advantages         how much better a completion is than its group
    policy_objective   the objective: the weight of each token; add a loss here
    policy_batch       arrays of an update
    policy_update      the updates of a step
    validation, pass_at_k   how well a model does on held-out items
    step_metrics, token_statistics   the metrics of a step
    samples_page       samples.md
    replay             run a recorded step again and compare
    audit              what a run is paid for
    task_record        checksums of tasks, so that a run resumes with the same ones

Tasks and verifiers are in `rungs/tasks`, start and loop in `rungs/training`, the sampler in
`rungs/model/rollouts.py`.

Imports the packages listed before it in `rungs/__init__.py`, except `huggingface` and `scaling`.
"""
