"""Install uv, which runs all other commands, into the folder .uv: `python3 install_uv.py`.

Works with every Python 3.9 or newer: one without pip (Debian, Ubuntu) or one that belongs to a
package manager, where PEP 668 forbids a plain `pip install`. Nothing outside .uv is changed.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / ".uv"
STANDALONE_PIP = "https://bootstrap.pypa.io/pip/pip.pyz"
"""https://pip.pypa.io/en/stable/installation/#standalone-zip-application"""
NO_OTHER_PLACE = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
"""Settings of pip that some users have, and that would keep it from installing into a folder."""


def main() -> None:
    """Install the newest uv, or exit with an error."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = ["-m", "pip"] if importlib.util.find_spec("pip") else [download_pip(scratch)]
        install = [*pip, "install", "-qq", "--upgrade", "--target", str(FOLDER), "uv"]
        environment = os.environ | NO_OTHER_PLACE
        sys.exit(subprocess.call([sys.executable, *install], env=environment))


def download_pip(folder: str) -> str:
    """Return the path of a pip that needs no installation."""
    try:
        return urllib.request.urlretrieve(STANDALONE_PIP, Path(folder, "pip.pyz"))[0]
    except OSError as error:
        sys.exit(
            f"this Python has no pip, and {STANDALONE_PIP} cannot be downloaded ({error}); install"
            " pip (Debian, Ubuntu: apt install python3-pip) and run this command again"
        )


if __name__ == "__main__":
    main()
