"""Read this file first: a tour from one tensor to a model that two ranks train like one process.

If this test fails, the package is broken for everybody.
"""

import pytest
import torch
import torch.nn.functional as F
import trained_as_one
from torch import nn

import syncbn
from syncbn.testing import assert_matches_full_batch


@pytest.mark.usefixtures("ranks_start_faster")
def test_the_tour() -> None:
    torch.manual_seed(0)

    # 1. A function takes the arguments of F.batch_norm. In one process it returns the result of F.batch_norm.
    x = torch.randn(8, 3, 5, 5)  # (N, C, H, W)
    running_mean, running_var = torch.zeros(3), torch.ones(3)
    y = syncbn.functional.sync_batch_norm(x, running_mean, running_var, training=True)
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True))
    torch.testing.assert_close(running_mean, 0.1 * x.mean((0, 2, 3)))

    # 2. A layer has the state_dict of nn.BatchNorm, and apex's extras: channels last, a residual z and a relu.
    layer = syncbn.SyncBatchNorm(3, channel_last=True, fuse_relu=True)
    plain = nn.BatchNorm2d(3)
    layer.load_state_dict(plain.state_dict())
    z = torch.randn(8, 5, 5, 3)  # (N, H, W, C)
    fused = layer(x.movedim(1, -1), z)
    torch.testing.assert_close(fused, F.relu(plain(x).movedim(1, -1) + z))

    # 3. One line converts the layers of a model in place.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    batch_norm = model[1]
    assert syncbn.convert_syncbn_model(model) is model
    assert type(batch_norm) is syncbn.SyncBatchNorm2d
    assert isinstance(batch_norm, nn.BatchNorm2d)
    print(syncbn.summary(model))

    # 4. The model trains. Under torchrun the only other line is model = DistributedDataParallel(model).
    labels = torch.arange(8) % 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4

    # 5. Evaluation is plain batch norm with the running statistics. Another line restores the layers of torch.
    expected = model.eval()(x)
    syncbn.revert_syncbn_model(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert torch.equal(model(x), expected)

    # 6. Two ranks, each with half of the batch, train a model like one process with the whole batch. `syncbn.testing`
    # starts the ranks, and compares the results in float64 to 1e-9. In a training job torchrun starts the ranks.
    assert_matches_full_batch(trained_as_one.model, trained_as_one.batch(8), F.cross_entropy, world_size=2)
    # With nn.BatchNorm, each rank normalises its half alone, so the results differ.
    with pytest.raises(AssertionError, match="differ from those of one process"):
        assert_matches_full_batch(trained_as_one.local_model, trained_as_one.batch(8), F.cross_entropy, world_size=2)
