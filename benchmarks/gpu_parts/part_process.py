"""The process of a part: `part_process.py MODULE SETTING`.

Prints each figure as a line of JSON, and `END` after the last one; everything else that is printed
goes to stderr. It ends, with all the processes that it has started, when its stdin is closed: its
parent has then been killed.
"""

import importlib
import json
import os
import signal
import sys
import threading

from benchmarks.gpu_parts import needs
from benchmarks.gpu_parts.setting import Setting

END = "end"


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    module, setting = sys.argv[1], Setting.from_json(sys.argv[2])
    with os.fdopen(os.dup(1), "w") as figures:
        os.dup2(2, 1)
        part = importlib.import_module(module)
        for figure in part.figures(setting):
            print(json.dumps(figure.checked()._asdict()), file=figures, flush=True)
        if setting.rehearse and (undeclared := needs.undeclared()):
            raise RuntimeError(f"imported, but not in needs.py: {', '.join(undeclared)}")
        print(END, file=figures, flush=True)


def end_with_parent() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
