"""Errors, files, JSON, logging: used by every other package, independent of models.

errors        UserError (exit code 2), RunFailure (1), "did you mean"
shown_text    text without secrets and control characters; tables and durations; the standard
              streams
namesake      refuses the other package called rungs in the same environment
command       begins and runs a command: imports, errors, exit code
machine       cores, memory, limits
paths         checks on paths and names from users and files; where the checkout is; growing files
disk          writes that follow no link and survive a power cut; messages for a full disk;
              folders that appear complete or not at all
strict_json   JSON parsed strictly, all errors reported at once
hub           the Hugging Face hub
run_log       messages on the terminal and in `train.log`
plugins       objects that other installed packages add as entry points
helper_process  child processes: beside training with low priority, or answering requests; the
                delays after which mirrors, trackers and the supervisor try again
signals       handling of signals that stop a run"""
