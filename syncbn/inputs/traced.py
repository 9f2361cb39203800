"""Handles calls that are being recorded: torch.fx gets a leaf where it can, other recorders an error with the remedy.

torch.fx.Tracer takes the layers of torch.nn for leaves (`is_leaf_module`) and traces through all others, so a layer of
ours makes its leaf itself, in its forward. Nothing here waits for other ranks: often one rank alone records.
"""

from typing import Any, NoReturn

from torch import nn
from torch.fx import Proxy, Tracer
from torch.fx.proxy import TraceError

from syncbn.arguments import Tensors
from syncbn.torch_internals.state import has_forward_hooks

LEAF_TRACER = "trace with a torch.fx.Tracer whose is_leaf_module is True for it"
REVERT = "call syncbn.revert_syncbn_model(model) first"


def leaf(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The Proxy of a node `call_module`, which stands for this call of `layer` in the graph.

    **Raises** TraceError where the call runs more than syncbn's own forward: what is around it is traced, as
    `super().forward(x) * 2`, and the leaf would run it again.
    """
    path, reason = tracer.path_of_module(layer) if isinstance(tracer, Tracer) else "", None
    forward = getattr(layer.forward, "__func__", None)
    if not path:
        reason = "torch.fx asks is_leaf_module only of modules inside the one that is traced; trace one that holds it"
    elif not getattr(forward, "__module__", "").startswith("syncbn."):
        reason = f"it has a forward around syncbn's, which would run twice; {LEAF_TRACER}"
    elif has_forward_hooks(layer):
        reason = f"it has forward hooks, which would run twice; {LEAF_TRACER}"
    if reason is not None:
        raise TraceError(f"syncbn: {path or 'the layer'} ({type(layer).__name__}) cannot be a leaf here: {reason}")
    return tracer.create_proxy("call_module", path, args, kwargs)


def refuse_proxies(tensors: Tensors) -> None:
    """**Raises** TraceError where torch.fx traces through this call."""
    proxies = [name for name, tensor in tensors._asdict().items() if isinstance(tensor, Proxy)]
    if proxies:
        raise TraceError(
            f"syncbn: torch.fx cannot trace through batch norm of all ranks ({', '.join(proxies)}: Proxy). For a "
            "layer use a Tracer whose is_leaf_module is True for it; for the function call "
            'torch.fx.wrap("sync_batch_norm") in your module.'
        )


def refuse_script(layer: nn.Module) -> NoReturn:
    """**Raises** RuntimeError: torch.jit.script cannot compile the layer."""
    remedy = REVERT
    if "_original_class" not in vars(layer):  # revert_syncbn_model leaves such a layer
        remedy = "load its state_dict into a model that is built with nn.BatchNorm"
    elif vars(layer)["_original_class"] is nn.SyncBatchNorm:  # torch.jit.script cannot compile it either
        remedy = REVERT.replace("(model)", "(model, nn.BatchNorm2d)") + ", or 1d or 3d as your model has them"
    raise RuntimeError(f"syncbn: torch.jit.script cannot compile {type(layer).__name__}: {remedy}")
