"""Errors, files, JSON, logging: what every other package uses and what knows nothing of models.

    errors        UserError (exit code 2), RunFailure (1), "did you mean"
    shown_text    text without secrets and control characters
    standard_streams  stdin, stdout and stderr, open in any case and safe for a terminal
    command       begins and runs a command: its imports, its errors, its exit code
    paths         checks on paths from users and files; where the checkout is
    disk          writes that follow no link and survive a power cut; messages for a full disk
    atomic_folder  folders that appear complete or not at all; locks that end with their process
    strict_json   JSON parsed strictly, all errors reported at once
    text_table    aligned columns and durations for terminal output
    hub           the Hugging Face hub
    run_log       messages on the terminal and in `train.log`
    plugins       what other installed packages add, found by their entry points
    growing_file  the new lines of a file that another process appends to
    helper_process  programs in processes of their own: beside training with low priority, or
                  answering what they are sent
    signals       what signals that stop a run do

Imports no other package of Rungs.
"""
