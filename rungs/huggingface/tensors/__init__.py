"""Tensors of Hugging Face models: names, shapes, and the files they are in.

rules   which tensor holds which parameter, for import and for export
reader  read tensors from safetensors or PyTorch files, one at a time"""
