"""A model in evaluation mode, called twice under DistributedDataParallel, has no backward
(https://github.com/pytorch/pytorch/issues/24397).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_24397.py
"""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

# torch 2.13 gave the argument a new name.
NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BROADCAST = {"forward_sync_buffers" if NEW_NAME else "broadcast_buffers": False}


def works(layer: nn.Module, training: bool, **options: bool) -> bool:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), layer).train(training), **options)
    try:
        (model(torch.randn(4, 3)) + model(torch.randn(4, 3))).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True


def main() -> None:
    in_words = {True: "works", False: "fails"}
    # On one GPU, and in evaluation, nn.SyncBatchNorm is nn.BatchNorm.
    training, evaluation = (in_words[works(nn.BatchNorm1d(3), mode)] for mode in (True, False))
    ours = in_words[works(syncbn.SyncBatchNorm1d(3), training=False)]
    assert works(syncbn.SyncBatchNorm1d(3), training=True)
    assert works(syncbn.SyncBatchNorm1d(3), training=False, **NO_BROADCAST)
    if dist.get_rank() == 0:
        print(f"torch: training {training}, evaluation {evaluation} (torch {torch.__version__})")
        print(f"syncbn: partly. Training works; evaluation {ours}, and works without DDP's broadcast of buffers")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
