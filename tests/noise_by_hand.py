"""The figures of measure_local_noise, written out in plain float64 for tests, value by value."""

import itertools
import math
import statistics

from torch import Tensor


def figures_by_hand(calls: list[list[Tensor]], eps: float = 1e-5) -> list[float]:
    """Of calls with a part (n, C, ...) for each rank: values of a rank and of the group; the deviations of means,
    measured and predicted, of variances, measured and predicted, and of outputs."""
    rows = []
    for parts in calls:
        for channel in range(parts[0].shape[1]):
            values = [part[:, channel].flatten().tolist() for part in parts]
            everything = [*itertools.chain(*values)]
            n, mean, std = len(everything), statistics.fmean(everything), statistics.pstdev(everything)
            for local in values:
                local_mean, local_std, k = statistics.fmean(local), statistics.pstdev(local), len(local)
                local_divisor, divisor = math.sqrt(local_std**2 + eps), math.sqrt(std**2 + eps)
                off = [((x - local_mean) / local_divisor - (x - mean) / divisor) ** 2 for x in local]
                rows.append(
                    (
                        k,
                        n,
                        ((local_mean - mean) / std) ** 2,
                        (n - k) / k / (n - 1),
                        (local_std**2 / std**2 - 1) ** 2,
                        (n / k) ** 2 * (k**2 - 1) / (n**2 - 1) - 2 * (n / k) * (k - 1) / (n - 1) + 1,
                        statistics.fmean(off),
                    )
                )
    counts, squares = [*zip(*rows, strict=True)][:2], [*zip(*rows, strict=True)][2:]
    return [*map(statistics.fmean, counts), *(math.sqrt(statistics.fmean(one)) for one in squares)]
