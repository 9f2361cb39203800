"""BatchNorm's running statistics take each micro-batch of an accumulated gradient for a batch
(https://github.com/pytorch/pytorch/issues/46516).

python tests/reports/pytorch_46516.py
"""

import torch
from torch import nn

import syncbn


def main() -> None:
    micro_batches = list(torch.randn(4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    theirs, whole, ours = (
        layer(3, dtype=torch.float64) for layer in (nn.BatchNorm1d, nn.BatchNorm1d, syncbn.SyncBatchNorm1d)
    )
    for x in micro_batches:
        theirs(x)
    whole(torch.cat(micro_batches))
    with syncbn.accumulate_running_stats(ours):
        for x in micro_batches:
            ours(x)
    torch.testing.assert_close(ours.state_dict(), whole.state_dict())
    moves, difference = theirs.num_batches_tracked, (theirs.running_var - whole.running_var).abs().max()
    print(
        f"torch: the statistics move {moves} times a step, and end {difference:.2f} from the whole batch's running_var"
    )
    print("syncbn: settled. With accumulate_running_stats they move once, as with the whole batch")


if __name__ == "__main__":
    main()
