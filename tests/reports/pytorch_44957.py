"""nn.SyncBatchNorm hangs when a rank does not call a part of the model
(https://github.com/pytorch/pytorch/issues/44957).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_44957.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncbn


class Model(nn.Module):
    """Its memory is for all frames but the first."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.memory = layer(3), layer(3)

    def forward(self, x: Tensor, num_first: int, skip: bool = False) -> Tensor:
        y = self.body(x)
        return y if skip else torch.cat((y[:num_first], self.memory(y[num_first:])))  # of no frame, on one rank


def main() -> None:
    rank = dist.get_rank()
    frames = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mine = frames[4 * rank : 4 * rank + 4]
    num_first = 4 * (rank == 1)
    said = ""
    try:
        Model(syncbn.SyncBatchNorm1d)(mine, num_first, skip=rank == 1).sum().backward()
    except RuntimeError as error:
        said = str(error)
    assert "rank 0: in memory forward, call 1\nrank 1: in body backward, call 1" in said

    model, alone = Model(syncbn.SyncBatchNorm1d), Model(nn.BatchNorm1d)
    model(mine, num_first).sum().backward()
    alone(frames.flip(0), num_first=4)  # those of rank 1
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    if rank == 0:
        print("torch: not shown here, as nn.SyncBatchNorm refuses CPU tensors")
        print("syncbn: partly. An error says where each rank is; one that has no sample for a part calls it with none")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
