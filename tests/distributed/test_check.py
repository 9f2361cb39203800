"""Tests that `unequal` and `python -m syncbn check` notice ranks that drift apart.

The command line is tested in test_testing.py.
"""

import itertools

import pytest
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from voting import Ranks

from syncbn.__main__ import check
from syncbn.testing import unequal


def test_unequal_lists_tensors_that_differ_by_a_byte_on_the_last_rank(ranks: Ranks) -> None:
    """NaN equals the same NaN, and strides do not count."""
    x = torch.arange(24.0).view(1, 2, 3, 4).to(ranks.device)
    last = ranks.rank == ranks.size - 1
    equal = {"strides": x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)}
    equal |= {"transposed": x[0, 0].t(), "empty": x[:0], "NaN": x / x, "flags": x > 3, "int": x.long()}
    assert unequal(equal) == []
    different = {"transposed": x[0, 0].t() + last, "NaN": x * 0 if last else x / x, "flags": (x > 3) ^ last}
    different |= {"scalar": x[0, 0, 0, 1] + last, "bfloat16": (x + 4 * last).bfloat16(), "int": x.long() + 3 * last}
    different |= {"complex": torch.complex(x, x * last), "sign of zero": -0.0 * x if last else 0.0 * x}
    assert unequal(equal | different) == [name for name in equal | different if name in different]


@pytest.mark.two_ranks
def test_check_fails_if_ranks_end_with_other_weights(ranks: Ranks) -> None:
    """The weights of rank 1 change after the second of two steps, on the ranks and also in the reference."""
    steps = itertools.count(1)

    def change_weight(optimizer: Optimizer, *_: object) -> None:
        if next(steps) % 2 == 0 and ranks.rank == 1:
            optimizer.param_groups[0]["params"][0].data.view(-1)[0] += 0.25

    assert check(ranks.device)[0]
    hook = register_optimizer_step_post_hook(change_weight)
    passed, report = check(ranks.device)
    hook.remove()
    assert not passed
    assert all(float(line.split()[2]) < 1e-5 for line in report.splitlines() if line.startswith("float"))
    assert "float64: the ranks have different values of 0.weight\n" in report
