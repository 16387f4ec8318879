"""Flax Linen: its checkpoints, and modules of either kind inside the other.

    arrays   the arrays of a Linen checkpoint, msgpack or Orbax, by their paths
    layouts  the Hugging Face names of arrays in the layouts that were published
    tensors  a Linen checkpoint, read as if it were a Hugging Face model
    bridge   `LinenGPT`, our `GPT` as a Linen module, and `GPTAroundLinen`, Linen blocks in ours

To add a layout, add its function to `LAYOUTS` in `layouts.py` and its family to `LinenFamily`.
Imports `common`, `config`, `parallel`, `model` and `checkpointing`.
"""
