"""Flax Linen: its checkpoints, and modules of either kind inside the other.

    checkpoint  a Linen checkpoint, msgpack or Orbax, read as if it were a Hugging Face model; the
                layouts that were published
    bridge      `LinenGPT`, our `GPT` as a Linen module, and `GPTAroundLinen`, Linen blocks in ours

To add a layout, add its function to `LAYOUTS` in `checkpoint.py` and its family to `LinenFamily`.
Imports `common`, `config`, `parallel`, `model` and `checkpointing`."""
