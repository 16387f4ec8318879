"""Generate text from a model: `uv run generate.py runs/layers "def main():"`.

Greedy, unless a sampling option is given. A single text is printed while it is generated. With
--chat, a conversation: each line that you type is a message, and the model answers it.
"""

from rungs.cli import run

if __name__ == "__main__":
    run("generate")
