"""The README's first command, on a Python as Debian, Ubuntu and Homebrew have it."""

import os
import subprocess
import sys
import sysconfig
import zipapp
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT

DOWNLOAD = "https://bootstrap.pypa.io/pip/pip.pyz"


class ManagedPython:
    """A Python that belongs to a package manager (PEP 668), without pip, and a checkout."""

    def __init__(self, place: Path) -> None:
        self.checkout = place / "checkout"
        self.home = place / "python"
        original = Path(sysconfig.get_path("stdlib"))
        library = self.home / "lib" / original.name
        self.packages = library / "site-packages"
        self.packages.mkdir(parents=True)
        for path in original.iterdir():
            if path.name not in ("site-packages", "dist-packages", "EXTERNALLY-MANAGED"):
                (library / path.name).symlink_to(path)
        (library / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=use apt\n")
        (self.home / "bin").mkdir()
        python = Path(sys._base_executable)  # type: ignore[attr-defined]
        (self.home / "bin" / "python3").symlink_to(python.resolve())
        self.checkout.mkdir()

    def add_script(self, standalone_pip: Path) -> None:
        """Copy the script into the checkout, with another place to get pip from."""
        script = (ROOT / "install_uv.py").read_text()
        assert DOWNLOAD in script
        changed = script.replace(DOWNLOAD, standalone_pip.as_uri())
        (self.checkout / "install_uv.py").write_text(changed)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout, without uv in its path."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        changed = {"PYTHONHOME": str(self.home), "PATH": f"{self.home / 'bin'}:/usr/bin:/bin"}
        return subprocess.run(
            ["sh", "-c", command],
            cwd=self.checkout,
            env=kept | changed | {"PIP_REQUIRE_VIRTUALENV": "1"},
            capture_output=True,
            text=True,
            check=False,
        )


def first_command() -> str:
    """Return what the README's first command in a clone does before it trains."""
    block = (ROOT / "README.md").read_text().split("```sh\n")[2].split("```")[0]
    first, second = block.splitlines()
    before, train = first.rsplit(" && ", 1)
    assert (train, second) == ("uv run train.py runs/a-to-a", "uv run pytest")
    return before


def install_pip(folder: Path) -> None:
    subprocess.run(["uv", "pip", "install", "-q", "--target", folder, "pip"], check=True)


@pytest.mark.long
@pytest.mark.parametrize("has_pip", [True, False])
def test_the_first_command_installs_uv(has_pip: bool, tmp_path: Path) -> None:
    python, standalone = ManagedPython(tmp_path), tmp_path / "pip.pyz"
    if has_pip:
        install_pip(python.packages)
        forbidden = python.run("PIP_REQUIRE_VIRTUALENV=0 python3 -m pip install uv")
        assert "externally-managed-environment" in forbidden.stderr
    else:
        install_pip(tmp_path / "pip")
        zipapp.create_archive(tmp_path / "pip", standalone, main="pip._internal.cli.main:main")
    python.add_script(standalone)
    before = sorted(python.packages.iterdir())
    done = python.run(f"{first_command()} && command -v uv && uv --version")
    assert done.returncode == 0, done.stderr
    place, version = done.stdout.splitlines()
    assert Path(place).parent == python.checkout / ".uv" / "bin"
    assert version.startswith("uv ")
    assert sorted(python.packages.iterdir()) == before


def test_without_pip_and_network_the_first_command_says_what_to_install(tmp_path: Path) -> None:
    python = ManagedPython(tmp_path)
    python.add_script(tmp_path / "missing.pyz")
    done = python.run(first_command())
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("this Python has no pip, and file:///")
    assert "apt install python3-pip" in line
    assert not (python.checkout / ".uv").exists()
