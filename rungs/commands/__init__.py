"""What the commands at the root do, once their options are read: a module for each.

    options        options that several commands have; loads Click only
    start_command  what the shared options of train.py and reinforce.py ask for, and the lock
    plan_options   the options of plan.py, checked
    train, reinforce, generate, …  what each command does

A command at the root declares its options and imports its module here when it is called, so that
`--help` waits for no library but Click. Defaults and choices that a help shows are in
`rungs/config/option_values.py`.

Imports all packages.
"""
