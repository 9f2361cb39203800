"""torch.compile(fullgraph=True) fails at nn.SyncBatchNorm (https://github.com/pytorch/pytorch/issues/156680).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_156680.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn


def main() -> None:
    stats, counts = torch.empty(2, 3, device="meta"), torch.empty(2, device="meta")
    try:  # an operator of its forward on tensors without values, as the compiler runs it
        torch.batch_norm_gather_stats_with_counts(stats, stats, stats, None, None, 0.1, 1e-5, counts)
        theirs = "batch_norm_gather_stats_with_counts can be compiled"
    except NotImplementedError:
        theirs = "the compiler cannot run its batch_norm_gather_stats_with_counts, which has no kernel for meta tensors"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), syncbn.SyncBatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, 6, 6)
    for one in model, compiled:
        DistributedDataParallel(one)(x).square().mean().backward()
    for parameter, expected in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    if dist.get_rank() == 0:
        print("torch:", theirs)
        print(
            "syncbn: settled. DistributedDataParallel of a model compiled as one graph has the gradients of eager mode"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
