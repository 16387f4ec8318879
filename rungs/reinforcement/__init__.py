"""Reinforcement learning from verifiable rewards.

    tasks      prompts and answers: built-in, from files, from reasoning-gym
    verifiers  what rewards completions

Imports the packages listed before it in `rungs/__init__.py`, except `huggingface`, `scaling` and
`training`.
"""
