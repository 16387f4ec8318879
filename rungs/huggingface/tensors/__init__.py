"""Tensors of Hugging Face models: names, shapes, files.

rules   mapping between tensors and parameters, for import and export
reader  read tensors from safetensors or PyTorch files, one at a time"""
