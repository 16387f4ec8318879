"""Tasks of reinforcement learning: sources of prompts and answers, split into training and held-out
items, and the verifiers that reward completions.

    opening        opens the task of a config
    task           interface of a source: items, each a prompt with its answer; pseudorandom draws
                   of items, and their split into training and validation
    item_file      items from files of JSON lines
    reasoning_gym  items of the library reasoning-gym
    parity, countdown, sorting, brackets, addition   the built-in tasks
    verifiers      functions that reward completions

To add a built-in task, write a file with `draw`, `worked`, `short` and `ALPHABET`, put it into
`BUILT_IN` of `opening`, and its settings into `rungs/config/reinforce_config.py`.

Nothing here imports JAX."""
