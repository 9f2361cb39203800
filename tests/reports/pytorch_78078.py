"""nn.SyncBatchNorm refuses CPU tensors (https://github.com/pytorch/pytorch/pull/78078).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_78078.py
"""

import torch
import torch.distributed as dist
from torch import nn

import syncbn


def main() -> None:
    rank = dist.get_rank()
    whole = torch.randn(8, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mine = whole.detach()[4 * rank : 4 * rank + 4].requires_grad_()
    try:
        nn.SyncBatchNorm(3, dtype=torch.float64)(mine)
        theirs = "takes CPU tensors"
    except ValueError as error:
        theirs = f"ValueError: {error}"

    nn.BatchNorm2d(3, dtype=torch.float64)(whole).pow(3).sum().backward()
    syncbn.SyncBatchNorm2d(3, dtype=torch.float64)(mine).pow(3).sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[4 * rank : 4 * rank + 4])
    if rank == 0:
        print("torch:", theirs)
        print("syncbn: settled. On 2 CPU ranks the gradients are those of one process with the whole batch")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
