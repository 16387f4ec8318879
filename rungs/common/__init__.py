"""What every other package may use and what knows nothing of models: errors, files, JSON, logging.

    errors        UserError (exit code 2), RunFailure (1), how commands report them
    paths         checks on paths from users and files; where the checkout is
    disk          writes that survive a power cut; messages for a full or read-only disk
    atomic_folder folders that appear whole or not at all
    strict_json   JSON parsed strictly, all mistakes in one pass
    text_table    aligned columns and durations for terminal output
    hub           every use of the network: the Hugging Face hub
    run_log       terminal messages and `train.log`
    signals       SIGINT and SIGTERM

Imports no other package of Rungs.
"""
