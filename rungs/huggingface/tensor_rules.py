"""Rules that map tensors of a Hugging Face model to Rungs parameters, with `{layer}` and `{expert}`
for the numbers in names. Imports nothing that needs JAX, so that configs are read at once."""

from typing import NamedTuple


class Rule(NamedTuple):
    """A pattern of tensor names, and the Rungs parameters in such a tensor, (inputs, outputs) as
    matrices. Several are concatenated along the outputs."""

    hf_name: str
    """Pattern with `{layer}` and `{expert}` for the numbers."""
    parameters: tuple[str, ...]
    transposed: bool = False
    """Whether the tensor is (outputs, inputs), as in PyTorch's Linear."""


def as_is(hf_name: str, *parameters: str) -> Rule:
    """Return the rule for a tensor with the same layout as the parameters."""
    return Rule(hf_name, parameters)


def linear(hf_name: str, *modules: str) -> tuple[Rule, Rule]:
    """Return the rules for a PyTorch Linear and its optional bias. It may concatenate several of
    our modules along its outputs."""
    kernels = tuple(f"{module}.kernel" for module in modules)
    biases = tuple(f"{module}.bias" for module in modules)
    return Rule(f"{hf_name}.weight", kernels, transposed=True), as_is(f"{hf_name}.bias", *biases)


def norm(hf_name: str, module: str) -> tuple[Rule, Rule]:
    """Return the rules for a norm and its optional bias."""
    scale = as_is(f"{hf_name}.weight", f"{module}.scale")
    return scale, as_is(f"{hf_name}.bias", f"{module}.bias")
