"""fvcore's update_bn_stats weights each batch by the rank's own number of values
(https://github.com/facebookresearch/fvcore/issues/152).

torchrun --standalone --nproc-per-node 2 tests/reports/fvcore_152.py
"""

import torch
import torch.distributed as dist

import syncbn


def main() -> None:
    rank = dist.get_rank()
    # In the first batch rank 0 has three images and rank 1 has one, in the second it is the other way round.
    sizes = [(3, 1), (1, 3)]
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randn(sum(size), 2, 4, 4, dtype=torch.float64, generator=generator) + i for i, size in enumerate(sizes)
    ]
    mine = [batch.split(size)[rank] for batch, size in zip(batches, sizes, strict=True)]

    layer = syncbn.SyncBatchNorm2d(2, momentum=1.0, dtype=torch.float64)  # running_mean: that of the batch of all ranks
    weighted, total = torch.zeros(2, dtype=torch.float64), 0
    for batch in mine:
        layer(batch)
        weighted += layer.running_mean * len(batch)
        total += len(batch)
    means = [torch.empty_like(weighted) for _ in range(2)]
    dist.all_gather(means, weighted / total)

    syncbn.recompute_running_stats(layer, mine)
    values = torch.cat(batches).transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer.running_mean, values.mean(1))
    torch.testing.assert_close(layer.running_var, values.var(1))
    if rank == 0:
        print(f"fvcore: its weights give running_mean[0] = {means[0][0]:.2f} on rank 0, {means[1][0]:.2f} on rank 1")
        print(f"syncbn: settled. It is {layer.running_mean[0]:.2f} on both, the mean of all values")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
