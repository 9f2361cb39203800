"""nn.SyncBatchNorm waits for the GPU to drop empty ranks, which CUDA graphs forbid
(https://github.com/pytorch/pytorch/issues/78656).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_78656.py
"""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm

import syncbn


def main() -> None:
    rank = dist.get_rank()
    by_mask = "[mask]" in inspect.getsource(SyncBatchNorm.forward)
    whole = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mine = whole.detach()[: 4 * (rank == 0)].requires_grad_()  # rank 1 has no image

    alone, layer = nn.BatchNorm2d(3), syncbn.SyncBatchNorm2d(3)
    alone(whole).pow(3).sum().backward()
    layer(mine).pow(3).sum().backward()
    torch.testing.assert_close(layer.state_dict(), alone.state_dict())
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[: len(mine)], rtol=1e-4, atol=1e-4)
    if rank == 0:
        print("torch: its forward", "selects counts by a mask" if by_mask else "has no mask", "(it needs a GPU)")
        print("syncbn: partly. A rank without images is exact, and needs no mask; no graph was captured on a GPU")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
