"""nn.SyncBatchNorm.convert_sync_batchnorm breaks torchsparse's BatchNorm, whose input is a SparseTensor
(https://github.com/mit-han-lab/torchsparse/issues/332).

torchrun --standalone --nproc-per-node 2 tests/reports/torchsparse_332.py
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncbn


@dataclass
class SparseTensor:
    """As torchsparse's: values at points."""

    feats: Tensor  # (points, C)
    coords: Tensor  # (points, 4)


class BatchNorm(nn.BatchNorm1d):
    """As torchsparse's."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        return replace(input, feats=super().forward(input.feats))


def main() -> None:
    points = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    mine = slice(0, 5) if dist.get_rank() == 0 else slice(5, 8)
    x = SparseTensor(points[mine], torch.zeros(len(points[mine]), 4))
    try:
        nn.SyncBatchNorm.convert_sync_batchnorm(BatchNorm(3))(x)
        theirs = "works"
    except AttributeError as error:
        theirs = f"AttributeError: {error}"

    output = syncbn.convert_syncbn_model(BatchNorm(3))(x)
    torch.testing.assert_close(output.feats, nn.BatchNorm1d(3)(points)[mine])
    if dist.get_rank() == 0:
        print("torch:", theirs)
        print(
            "syncbn: partly. A layer like torchsparse's is synchronised, with 5 and 3 points; torchsparse was not tried"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
