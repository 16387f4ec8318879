"""`rungs COMMAND` and `python -m rungs COMMAND`: the commands, wherever Rungs is installed."""

from rungs.common.command import begin_command, run_command

import importlib
import sys

from rungs.cli import COMMANDS
from rungs.common import signals
from rungs.common.namesake import refuse_namesake


def main() -> None:
    """Run the command that the first argument names, and end the process."""
    begin_command()
    refuse_namesake()  # whose own `rungs/__init__.py` may have replaced ours
    if sys.argv[1:2] in (["train"], ["reinforce"]):
        signals.exit_on_signal()
    import click

    class Commands(click.Group):
        """Imports a command when it is asked for."""

        def list_commands(self, _: click.Context) -> list[str]:
            return [name for names in COMMANDS.values() for name in names]

        def get_command(self, _: click.Context, name: str) -> click.Command | None:
            if name not in self.list_commands(_):
                return None
            module = importlib.import_module(f"rungs.cli.{name.replace('-', '_')}")
            command: click.Command = module.main
            return command

        def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
            width = max(map(len, self.list_commands(context)))
            for group, names in COMMANDS.items():
                commands = [(name, self.get_command(context, name)) for name in names]
                limit = formatter.width - width - 4
                rows = [(n.ljust(width), c.get_short_help_str(limit)) for n, c in commands if c]
                with formatter.section(group):
                    formatter.write_dl(rows)

    about = (
        "Train language models in JAX from run folders. Runs and datasets are kept where you are."
    )
    version = click.version_option(package_name="rungs-lm")
    run_command(version(Commands(help=about)))


if __name__ == "__main__":
    main()
