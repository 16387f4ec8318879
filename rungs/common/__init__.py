"""Errors, files, JSON, logging: what every other package uses and what knows nothing of models.

    errors        UserError (exit code 2), RunFailure (1), "did you mean"
    shown_text    text without secrets and control characters
    standard_streams  stdin, stdout and stderr, open in any case and safe for a terminal
    command       begins and runs a command: its imports, its errors, its exit code
    paths         checks on paths from users and files; where the checkout is
    disk          writes that follow no link and survive a power cut; messages for a full disk
    atomic_folder  folders that appear complete or not at all, and the lock while one is built
    file_lock     a lock that ends with its process
    strict_json   JSON parsed strictly, all errors reported at once
    text_table    aligned columns and durations for terminal output
    hub           the Hugging Face hub
    run_log       messages on the terminal and in `train.log`
    plugins       what other installed packages add, found by their entry points
    growing_file  the new lines of a file that another process appends to
    helper_process  programs of Rungs that run beside training, with low priority
    answering_process  a program that answers what it is sent, in a process of its own
    signals       what signals that stop a run do

Imports no other package of Rungs.
"""
