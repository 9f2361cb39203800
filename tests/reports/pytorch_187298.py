"""torch's converter drops in silence what a subclass of BatchNorm adds (https://github.com/pytorch/pytorch/issues/187298).

python tests/reports/pytorch_187298.py
"""

import warnings

import torch
from torch import Tensor, nn

import syncbn


class NormAct(nn.BatchNorm2d):
    """Batch norm and ReLU."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Centre(nn.BatchNorm2d):
    """Nothing in it can be synchronised."""

    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean((0, 2, 3), keepdim=True)


def main() -> None:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = nn.SyncBatchNorm.convert_sync_batchnorm(NormAct(3))(x)
        num_theirs = len(caught)
        ours = syncbn.convert_syncbn_model(NormAct(3))(x)
        syncbn.convert_syncbn_model(Centre(3))(x)
    torch.testing.assert_close(ours, NormAct(3)(x))
    (warning,) = caught[num_theirs:]
    assert "Centre.forward calls neither" in str(warning.message)
    print(f"torch: the ReLU is lost, the least output is {theirs.min():.1f}; {num_theirs} warnings")
    print("syncbn: settled. The ReLU stays; a class whose own mathematics cannot be synchronised is named in a warning")


if __name__ == "__main__":
    main()
