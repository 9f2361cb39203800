"""Evaluates, without communication: F.batch_norm with the running statistics or with those of this rank's batch."""

from torch import Tensor

from syncbn.arguments import Options, Tensors, check, check_eps, require_float64
from syncbn.inputs import apply_mask, make_dense, unwrap
from syncbn.ranks.reduction import ONE_RANK
from syncbn.step import normalize
from syncbn.torch_batch_norm import batch_norm


def evaluate(tensors: Tensors, options: Options, caller: object = None) -> Tensor:
    """Return y, normalised with the running statistics or, if there are none, with the statistics of this rank's batch.
    `caller` is a layer or None."""
    tensors, options, wrap = unwrap(tensors, options)
    check(tensors, options, caller)
    is_masked_batch = tensors.mask is not None and tensors.running_mean is None
    tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
    if is_masked_batch:  # F.batch_norm cannot leave values out of the statistics.
        check_eps(options.eps, training=True)
        require_float64(tensors.input)
        return wrap(apply_to_output(normalize(make_dense(tensors, options), options, ONE_RANK)[0]))
    return wrap(apply_to_output(batch_norm(tensors, options, training=tensors.running_mean is None)))
