"""Uses private names of torch's modules: their hooks, and what torch.compile makes of them."""

from torch import nn


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks of this module run before or after its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped this module: torch.compile(module) returns a wrapper that holds the module as
    _orig_mod, module.compile() sets _compiled_call_impl."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
