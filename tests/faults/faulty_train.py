"""`train.py` with a fault of `injected_faults.py`: `faulty_train.py FAULT[:ARGUMENT]… RUN …`.

Rungs itself has no code for faults.
"""

import sys

from rungs.common import signals

if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    sys.argv = ["train.py", *arguments]
    signals.exit_on_signal()

    from tests.faults import injected_faults

    name, *values = fault.split(":")
    getattr(injected_faults, name)(*values)

    from rungs.common.command import run_command

    from rungs.cli import train

    run_command(train.main)
