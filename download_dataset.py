"""Command: build a dataset from your own files or from text on the hub, or download tokens."""

from rungs.cli import run

if __name__ == "__main__":
    run("download_dataset")
