"""Errors, files, JSON, logging: used by every other package, independent of models.

    errors        UserError (exit code 2), RunFailure (1), "did you mean"
    shown_text    text without secrets and control characters
    standard_streams  stdin, stdout and stderr, always open and safe for a terminal
    command       begins and runs a command: imports, errors, exit code
    paths         checks on paths from users and files; where the checkout is
    disk          writes that follow no link and survive a power cut; messages for a full disk
    atomic_folder  folders that appear complete or not at all; locks that end with their process
    strict_json   JSON parsed strictly, all errors reported at once
    text_table    aligned columns and durations for terminal output
    hub           the Hugging Face hub
    run_log       messages on the terminal and in `train.log`
    plugins       objects that other installed packages add as entry points
    growing_file  the new lines of a file that another process appends to
    helper_process  child processes: beside training with low priority, or answering requests
    signals       handling of signals that stop a run

Imports no other package of Rungs."""
