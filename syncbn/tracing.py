"""Answers torch.fx, with a leaf of the graph or an error, and torch.jit.script, with an error.

A call inside torch.fx becomes a leaf of the graph if possible. torch.fx.Tracer traces through modules from outside of
torch.nn (`is_leaf_module`), so the forward of a synchronised layer creates the leaf itself. Tracing does not
communicate, because often only one rank traces.
"""

from typing import Any, NoReturn

from torch import nn
from torch.fx import Proxy, Tracer
from torch.fx.proxy import TraceError

from syncbn.arguments import Tensors
from syncbn.torch_internals import has_forward_hooks

LEAF_TRACER = "trace with a torch.fx.Tracer whose is_leaf_module is True for this layer"


def create_leaf(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a node `call_module` for this call of `layer` to the graph, and return the Proxy of the node.

    **Raises** TraceError if the call runs more than syncbn's own forward. Code around that forward, such as
    `super().forward(x) * 2`, is traced too, and the leaf would run that code a second time.
    """
    path, reason = tracer.path_of_module(layer) if isinstance(tracer, Tracer) else "", None
    forward = getattr(layer.forward, "__func__", None)
    if not path:
        reason = "only a submodule of the traced module can be a leaf; trace a module that contains this layer"
    elif not getattr(forward, "__module__", "").startswith("syncbn."):
        reason = f"it has a forward that wraps syncbn's and would run twice; {LEAF_TRACER}"
    elif has_forward_hooks(layer):
        reason = f"it has forward hooks, which would run twice; {LEAF_TRACER}"
    if reason is not None:
        raise TraceError(f"syncbn: {path or 'the layer'} ({type(layer).__name__}) cannot be a leaf here: {reason}")
    return tracer.create_proxy("call_module", path, args, kwargs)


def refuse_proxies(tensors: Tensors) -> None:
    """**Raises** TraceError if an argument is a Proxy of torch.fx."""
    proxies = [name for name, tensor in tensors._asdict().items() if isinstance(tensor, Proxy)]
    if proxies:
        raise TraceError(
            f"syncbn: torch.fx cannot trace through synchronised batch norm ({', '.join(proxies)}: Proxy). For a "
            "layer, use a Tracer whose is_leaf_module is True for the layer. For a function, call "
            'torch.fx.wrap("sync_batch_norm") in the module that calls the function.'
        )


def refuse_script(layer: nn.Module) -> NoReturn:
    """**Raises** RuntimeError, because torch.jit.script cannot compile the layer."""
    original, remedy = vars(layer).get("_original_class"), "call syncbn.revert_syncbn_model(model) first"
    if original is None:  # revert_syncbn_model does not change a layer that was never converted.
        remedy = "load its state_dict into a model that is built with nn.BatchNorm"
    elif original is nn.SyncBatchNorm:  # torch.jit.script cannot compile nn.SyncBatchNorm either.
        remedy = remedy.replace("(model)", "(model, nn.BatchNorm2d)") + ", or with nn.BatchNorm1d or nn.BatchNorm3d"
    raise RuntimeError(f"syncbn: torch.jit.script cannot compile {type(layer).__name__}: {remedy}")
