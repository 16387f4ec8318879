"""Tasks of reinforcement learning: sources of prompts and answers, split into training and held-out
items, and what answers and rewards completions.

    catalog             opens the task of a config; the built-in tasks
    task                interface of a source: items, each a prompt with its answer; pseudorandom
                        draws of items, and their split into training and validation
    item_file           items from files of JSON lines
    reasoning_gym       items of the library reasoning-gym
    environment         answers a completion's turns: a verifier, tools, or an environment
    library             items and environments of other libraries, by their adapters
    verifiers_adapter   the library verifiers
    openenv_adapter     the library OpenEnv
    tools               a calculator, Python and the user's functions
    verifier            opens the verifier of a config; a `reward` function in another process
    built_in_verifiers  exact, last_number, gsm8k, countdown, sorted, brackets, parity
    math_verifier       math: expressions in LaTeX, compared by math-verify
    code_process        calls a user's code in other processes
    code_child          the program of those processes; nothing imports it
    checkup             checks a verifier before training

To add a built-in task, put its draw and its completions into `BUILT_IN` of `catalog`, and its
settings into `rungs/config/reinforce_config.py`. To add a built-in verifier, put it into `BUILT_IN`
of `built_in_verifiers`, and its name into `BuiltInVerifier` of that config.

Nothing here imports JAX."""
