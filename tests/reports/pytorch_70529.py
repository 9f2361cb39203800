"""BatchNorm counts the padding of sequences (https://github.com/pytorch/pytorch/issues/70529).

python tests/reports/pytorch_70529.py
"""

import torch
from torch import nn

import syncbn


def main() -> None:
    lengths = torch.tensor([5, 3, 1])
    mask = torch.arange(5) < lengths[:, None]  # (N, L)
    x = (4 + torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))) * mask[:, None]  # (N, C, L)
    values = x.transpose(1, 2)[mask]  # (sum of lengths, C), without padding
    expected, padded = nn.BatchNorm1d(2, momentum=1.0), nn.BatchNorm1d(2, momentum=1.0)
    normal = expected(values)
    padded(x)

    ours = syncbn.SyncBatchNorm1d(2, momentum=1.0)
    y = ours(x, mask=mask)
    torch.testing.assert_close(y.transpose(1, 2)[mask], normal)
    assert not y.transpose(1, 2)[~mask].any()
    torch.testing.assert_close(ours.state_dict(), expected.state_dict())
    print(f"torch: running_mean[0] is {padded.running_mean[0]:.2f}, of the values {expected.running_mean[0]:.2f}")
    print(
        f"syncbn: settled. With mask= it is {ours.running_mean[0]:.2f}, and the outputs are those of the values alone"
    )


if __name__ == "__main__":
    main()
