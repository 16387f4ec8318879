"""`rungs COMMAND` and `python -m rungs COMMAND`: the commands, wherever Rungs is installed."""

from rungs.common.command import begin_command, run_command

import importlib
import sys

from rungs.cli import COMMANDS
from rungs.common import signals


def main() -> None:
    """Run the command that the first argument names, and end the process."""
    begin_command()
    if sys.argv[1:2] in (["train"], ["reinforce"]):
        signals.exit_on_signal()
    import click

    class Commands(click.Group):
        """Imports a command when it is asked for."""

        def list_commands(self, _: click.Context) -> list[str]:
            return [name.replace("_", "-") for name in COMMANDS]

        def get_command(self, _: click.Context, name: str) -> click.Command | None:
            if name not in self.list_commands(_):
                return None
            command: click.Command = importlib.import_module(
                f"rungs.cli.{name.replace('-', '_')}"
            ).main
            return command

    run_command(Commands(help="Train language models in JAX from run folders."))


if __name__ == "__main__":
    main()
