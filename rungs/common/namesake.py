"""The other project on the package index that is called `rungs`; see docs/architecture.md."""

from rungs.common.command import end_with

import sys
from importlib import metadata

from rungs.common.errors import UserError


def refuse_namesake() -> None:
    """End the command, or raise ImportError, if that project is installed here, too. Installers
    write the files of one over those of the other without a word."""
    try:
        version = metadata.version("rungs")
    except metadata.PackageNotFoundError:
        return
    line = (
        f"{sys.prefix}: the package rungs {version} is here, too: another project, whose files have"
        " the names of those of rungs-lm; uninstall both, then install rungs-lm without it"
    )
    if sys.argv[0].endswith(("/rungs", "/rungs-lm")):
        end_with(UserError(line))
    raise ImportError(line)
