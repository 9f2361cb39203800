"""torch converts BatchNorm to nn.SyncBatchNorm, and not back (https://github.com/pytorch/pytorch/issues/41081).

python tests/reports/pytorch_41081.py
"""

import torch
from torch import nn

import syncbn


def main() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(2), nn.BatchNorm1d(4))
    classes = [type(module) for module in model]
    x = torch.randn(4, 3, 8, 8)
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm1d(4)))

    syncbn.convert_syncbn_model(model)(x)
    trained = model.eval()(x)
    assert [type(module) for module in syncbn.revert_syncbn_model(model)] == classes
    assert torch.equal(model(x), trained)
    # Which of them it was, torch's converter has not kept.
    assert type(syncbn.revert_syncbn_model(theirs[0], nn.BatchNorm2d)) is nn.BatchNorm2d
    print(f"torch: BatchNorm2d and BatchNorm1d become {type(theirs[1]).__name__}, which keeps neither name")
    print("syncbn: settled. revert_syncbn_model gives back the classes, and the outputs stay the same bit by bit")


if __name__ == "__main__":
    main()
