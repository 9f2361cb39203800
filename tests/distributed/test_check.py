"""Tests that `unequal` and `python -m syncbn check` notice ranks that differ. test_testing.py has the command line."""

import pytest
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from voting import Ranks

from syncbn.__main__ import check
from syncbn.testing import unequal


def test_unequal_compares_bytes(ranks: Ranks) -> None:
    """NaN equals the same NaN, 0 does not equal -0, and strides do not count."""
    x = torch.arange(24.0, device=ranks.device).view(1, 2, 3, 4)
    nan = torch.full_like(x, torch.nan)
    # A name has two tensors: the tensor of the last rank, and the tensor of the other ranks.
    equal = {"strides": (x.to(memory_format=torch.channels_last), x), "empty": (x[:0], x[:0]), "NaN": (nan, nan)}
    different = {"one NaN": (nan, x), "transposed": (x.mT + 1, x.mT), "scalar": (x[0, 0, 0, 1], x[0, 0, 0, 2])}
    different |= {"bool": (x > 3, x > 4), "int": (x.long() + 3, x.long()), "bfloat16": (x.bfloat16() + 4, x.bfloat16())}
    different |= {"complex": (x * 1j, x * 2j), "sign of zero": (-0.0 * x, 0.0 * x)}
    is_last = ranks.rank == ranks.size - 1
    tensors = {name: last if is_last else other for name, (last, other) in (equal | different).items()}
    assert unequal(tensors) == [*different]


@pytest.mark.two_ranks
def test_check_fails_if_the_weights_of_the_ranks_differ(ranks: Ranks) -> None:
    def add_rank(optimizer: Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["params"][0].data += ranks.rank

    assert check(ranks.device)[0]
    hook = register_optimizer_step_post_hook(add_rank)
    passed, report = check(ranks.device)
    hook.remove()
    assert not passed
    assert "float64: the ranks have different values of 0.weight" in report
