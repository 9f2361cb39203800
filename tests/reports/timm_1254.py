"""torch's converter makes timm's BatchNormAct2d skip dropout and activation
(https://github.com/huggingface/pytorch-image-models/issues/1254).

python tests/reports/timm_1254.py
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import syncbn


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.drop, self.act = nn.Dropout(0.1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        buffers = self.running_mean, self.running_var
        x = batch_norm(x, *buffers, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(x))


def main() -> None:
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 3, padding=1), BatchNormAct2d(3))]
    model = nn.Sequential(*blocks).eval()
    x = torch.randn(4, 3, 8, 8)
    expected = model(x)
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))(x)
    ours = syncbn.convert_syncbn_model(model)
    assert torch.equal(ours(x), expected)
    assert isinstance(ours[1], syncbn.SyncBatchNorm)
    print(f"torch: the outputs have the sum {theirs.sum():.2f}, and {expected.sum():.2f} before the conversion")
    print("syncbn: settled. The outputs are those before the conversion, bit by bit")


if __name__ == "__main__":
    main()
