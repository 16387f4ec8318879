"""Tensors of Hugging Face models: names, shapes, and the files they are in.

rules         which tensor holds which parameter, for import and for export
match         compare a model's tensors with what its family expects
reader        read tensors from a folder, one at a time
torch_file    read PyTorch's `.bin` files
torch_pickle  parse the pickle in a `.bin` file without running it
"""
