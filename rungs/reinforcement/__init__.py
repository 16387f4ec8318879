"""Reinforcement learning from verifiable rewards, as a run that resumes bit for bit.

    policy_learner     the kind of run: opens tasks, takes steps, validates; checkpoint records
    sampling           the prompts of each step and of validation; completions, turn by turn
    turn_format        prompts, turns and replies as tokens, in the model's chat template
    rollout_files      every sampled text, in files per step; samples.md
    policy_update      the updates of a step, and their arrays; metrics of a step; pass@k
    rerun              reruns a recorded step and compares
    environment_check  asks environments and tools the same twice
    audit              which texts get reward, to detect reward hacking

Tasks, verifiers and environments are in `rungs/tasks`, the objective in
`rungs/objectives/policy.py`, starting and the loop in `rungs/training`, the sampler in
`rungs/model/rollouts.py`."""
