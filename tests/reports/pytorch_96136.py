"""Activation checkpointing moves BatchNorm's running statistics twice a step
(https://github.com/pytorch/pytorch/issues/96136).

python tests/reports/pytorch_96136.py
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import syncbn


def step(layer: nn.Module, **options: bool) -> nn.Module:
    """The layer after a training step; checkpointed, if there are options."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = checkpoint(layer, x, **options) if options else layer(x)
    y.pow(3).sum().backward()
    return layer


def main() -> None:
    theirs = [
        int(step(nn.BatchNorm1d(3), use_reentrant=use_reentrant).num_batches_tracked) for use_reentrant in (True, False)
    ]
    expected = step(syncbn.SyncBatchNorm1d(3))
    for use_reentrant in True, False:
        ours = step(syncbn.SyncBatchNorm1d(3), use_reentrant=use_reentrant)
        for name, buffer in expected.named_buffers():
            assert torch.equal(ours.get_buffer(name), buffer)
    print(f"torch: num_batches_tracked after one step, reentrant and not: {theirs}")
    print("syncbn: settled. The buffers are those of the layer without checkpointing, bit by bit")


if __name__ == "__main__":
    main()
