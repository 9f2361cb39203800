"""After detectron2's PreciseBN hook the ranks have different running statistics
(https://github.com/facebookresearch/detectron2/issues/5398).

torchrun --standalone --nproc-per-node 2 tests/reports/detectron2_5398.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import update_bn

import syncbn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    local = copy.deepcopy(model)
    rank = dist.get_rank()
    images = [torch.randn(1 + index + rank, 3, 8 + rank, 8) for index in range(3)]  # numbers and sizes are the rank's
    update_bn(images, local)
    difference = local[1].running_mean * (1 - 2 * rank)
    dist.all_reduce(difference)  # that of rank 0 less that of rank 1

    syncbn.recompute_running_stats(syncbn.convert_syncbn_model(model), images)
    syncbn.assert_synced(model)
    if rank == 0:
        print(f"torch: after update_bn the running means of rank 0 and 1 differ by {difference.abs().max():.2g}")
        print("syncbn: settled. After recompute_running_stats the models of all ranks are the same, bit by bit")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
