"""Reinforcement learning from verifiable rewards, as a run that resumes bit for bit.

    policy_learner     the kind of run: opens tasks, takes steps, validates; checkpoint records
    sampling           the prompts of each step and of validation; completions, verified
    rollout_files      every sampled text, in files per step; samples.md
    policy_update      the updates of a step, and their arrays; metrics of a step; pass@k
    rerun              reruns a recorded step and compares
    audit              which texts get reward, to detect reward hacking

Tasks and verifiers are in `rungs/tasks`, the objective in
`rungs/objectives/policy.py`, starting and the loop in `rungs/training`, the sampler in
`rungs/model/rollouts.py`."""
