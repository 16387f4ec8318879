"""Verifiers, which reward completions, and the check of a verifier before training.

    opening               opens the verifier of a config
    verdict               the rewards of a completion, and the verifier's outcome
    built_in              exact, last_number, gsm8k, countdown, sorted, brackets, parity; arithmetic
                          expressions, evaluated exactly, without running code
    reward_process        a `reward` function in another process, with limits
    reward_child          the program of that process; nothing imports it
    reasoning_gym_reward  the `reward` function of reasoning-gym's items
    checkup               checks a verifier before training

Nothing here imports JAX."""
