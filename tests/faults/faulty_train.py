"""`train.py` with a fault put in from outside: `faulty_train.py FAULT RUN …`.

FAULT is `module.function` or `module.function:argument:…`: a function beside this file, which is
called with those texts before the command runs and patches what it likes. No line of the product
knows of faults.
"""

import importlib
import sys

from rungs.common import signals


def put_in(fault: str) -> None:
    name, *arguments = fault.split(":")
    module, _, function = name.rpartition(".")
    getattr(importlib.import_module(f"tests.faults.{module}"), function)(*arguments)


if __name__ == "__main__":
    fault, *arguments = sys.argv[1:]
    sys.argv = ["train.py", *arguments]
    signals.exit_on_signal()
    put_in(fault)

    import train
    from rungs.common.errors import run_command

    run_command(train.main)
