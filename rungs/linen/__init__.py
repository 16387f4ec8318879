"""Flax Linen: its checkpoints, and Linen and NNX modules inside each other.

    checkpoint  a Linen checkpoint, msgpack or Orbax, read like a Hugging Face model
    bridge      `LinenGPT`, our `GPT` as a Linen module, and `GPTAroundLinen`, Linen blocks in ours

To add a layout, add its function to `LAYOUTS` in `checkpoint.py`, its family to `LinenFamily`."""
