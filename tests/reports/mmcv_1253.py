"""A model with nn.SyncBatchNorm cannot be used on a CPU, and the way back of mmcv loses the check of the input's dims
(https://github.com/open-mmlab/mmcv/pull/1253).

python tests/reports/mmcv_1253.py
"""

import torch
from torch import nn

import syncbn


def takes(layer: nn.Module, x: torch.Tensor) -> str:
    try:
        layer(x)
    except ValueError:
        return "refuses"
    return "takes"


def main() -> None:
    image, sequence = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5)
    theirs = takes(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3)), sequence)
    layer = syncbn.convert_syncbn_model(nn.BatchNorm2d(3))
    assert takes(layer, image) == "takes"
    assert takes(layer, sequence) == "refuses"
    syncbn.revert_syncbn_model(layer.eval())
    assert type(layer) is nn.BatchNorm2d
    assert takes(layer, image) == "takes"
    assert takes(layer, sequence) == "refuses"
    print(f"torch: a converted BatchNorm2d {theirs} sequences")
    print("syncbn: settled. A converted and a reverted BatchNorm2d take images on a CPU and refuse sequences")


if __name__ == "__main__":
    main()
