"""Import, export and upload Hugging Face models: `uv run pretrained.py import ID_OR_FOLDER RUN`."""

from rungs.cli import run

if __name__ == "__main__":
    run("pretrained")
