"""Chooses the reduction of a call as torch is running now, and notes on the layer over how many ranks it went."""

from torch import Tensor

from syncbn.comm.groups import SpecOfCall
from syncbn.diagnosis.sites import CallsOnGroups
from syncbn.reductions.eager import reduction_of
from syncbn.reductions.graph import reduction_in_graph
from syncbn.reductions.interface import Reduction
from syncbn.torch_internals.state import is_compiling, is_jit_tracing


def reduction_now(spec: SpecOfCall, caller: CallsOnGroups, input: Tensor | None) -> Reduction:
    """The ranks that a call synchronises. **Raises** RuntimeError in torch.jit.trace, which cannot record them, before
    anything is sent: often one rank alone records."""
    if is_compiling():
        return reduction_in_graph(spec)
    if is_jit_tracing():
        raise RuntimeError(
            "syncbn: torch.jit.trace, which torch.onnx.export(dynamo=False) uses, cannot record batch norm of all "
            "ranks: call syncbn.revert_syncbn_model(model) first, or model.eval()"
        )
    return reduction_of(spec, caller, getattr(input, "dtype", None))


def note_ranks(caller: CallsOnGroups, reduction: Reduction) -> None:
    """Note over how many ranks the caller was synchronised."""
    if not is_compiling():  # where an attribute that changes would compile a graph again
        object.__setattr__(caller, "_synchronised_ranks", reduction.num_ranks)  # a layer's own may refuse
