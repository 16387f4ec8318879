"""Generate the JSON schemas and the page of config keys from `rungs/config/`."""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path

import click


@click.command()
def main() -> None:
    """Write schemas/ and docs/configuration.md from the config types."""
    with importing():
        from rungs.config.reference import write_generated_files
        from rungs.experiments.folder import CONFIG
        from rungs.experiments.kinds import KINDS
    write_generated_files(Path(__file__).parent, {CONFIG: list(KINDS.values())})


if __name__ == "__main__":
    run_command(main)
