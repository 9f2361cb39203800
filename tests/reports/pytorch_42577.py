"""DistributedDataParallel.join cannot train nn.SyncBatchNorm to the end of uneven data
(https://github.com/pytorch/pytorch/pull/42577).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_42577.py
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn


def train(model: nn.Module, batches: list[Tensor]) -> None:
    for x in batches:
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    batches = torch.randn(2, 2, 4, 3, dtype=torch.float64)  # (batch, rank, N, C)
    mine = list(batches[: 2 - dist.get_rank(), dist.get_rank()])  # rank 1 has one batch only
    model = copy.deepcopy(start)
    ddp = DistributedDataParallel(model)
    try:
        with ddp.join(throw_on_early_termination=True):  # which DDP's documentation wants with SyncBatchNorm
            train(ddp, mine)
    except RuntimeError:
        steps = int(model[1].num_batches_tracked)

    alone = copy.deepcopy(start)
    train(alone, [torch.cat((batches[0, 0], batches[0, 1])), batches[1, 0]])
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(start))
    with syncbn.join(ddp, divide_by_initial_world_size=False):
        train(ddp, mine)
    torch.testing.assert_close(ddp.module.state_dict(), alone.state_dict())
    if dist.get_rank() == 0:
        print(f"torch: all ranks end when one has no more data, rank 0 after {steps} of 2 steps")
        print(
            "syncbn: settled. Both steps are made, and the model is that of one process with the batches of each step"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
