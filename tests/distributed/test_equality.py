"""Tests that a step equals that of the whole batch where test_fuzz.py draws no case: inputs that lose digits, NaN."""

import pytest
import torch
from oracle import HARD_INPUTS, errors_of_one_step, full_batch, relative_error
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from voting import Ranks

import syncbn

C = 3


@pytest.mark.parametrize("case", HARD_INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hard_inputs_lose_no_digits(ranks: Ranks, case: str, dtype: torch.dtype) -> None:
    """float32 sums of squares lose all digits at mean/std = 1e4; float64 sums about zero keep float32 exact."""
    errors = errors_of_one_step(case, dtype, syncbn.functional.sync_batch_norm, ranks.rank, ranks.size, ranks.device)
    bound = 1e-6 if dtype == torch.float32 else max(1e-12, 2e-15 * (1 + errors.mean_over_std**2))
    assert {name: error for name, error in errors.relative.items() if error > bound} == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:syncbn. .*NaN or infinity")
def test_nan_and_infinity_reach_the_outputs_and_buffers_of_all_ranks(ranks: Ranks, bad: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, C, 4, dtype=torch.float64)
    x[-1, 1, 2] = bad  # This is a sample of the last rank.
    plain, local = nn.BatchNorm1d(C, dtype=torch.float64), ranks.even_slice(len(x))
    layer = syncbn.SyncBatchNorm1d(C, dtype=torch.float64, device=ranks.device)
    torch.testing.assert_close(layer(x[local].to(ranks.device)).cpu(), plain(x)[local], equal_nan=True)
    torch.testing.assert_close(layer.cpu().state_dict(), plain.state_dict(), equal_nan=True)


def test_a_rank_whose_output_gets_no_gradient_still_communicates(ranks: Ranks) -> None:
    """Autograd calls backward with None. The other ranks wait for the zeros of this rank."""
    layer = syncbn.SyncBatchNorm(C, dtype=torch.float64, device=ranks.device)
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, C, dtype=torch.float64, device=ranks.device)
    local = ranks.even_slice(len(x))
    leaf = x[local].requires_grad_()
    y = layer(leaf)
    (torch._C._functions.UndefinedGrad()(y) if ranks.rank == 0 else y).sin().sum().backward()
    dy = torch.cos(full_batch(x, x).output)
    dy[:2] = 0
    assert relative_error(leaf.grad, full_batch(x, dy).grad_input[local]) < 1e-12


def test_profiler_ranges_contain_the_collectives(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    x = torch.randn(2, C, device=ranks.device, requires_grad=True)
    with torch.profiler.profile(acc_events=True) as profile:  # Without acc_events torch 2.11 warns.
        layer(x).sum().backward()
    on_cpu = ranks.device.type == "cpu"
    collective, backward = ("alltoall", "syncbn.backward") if on_cpu else ("allreduce", "_StepBackward")  # docs/gpu.md

    def ranges_around(event: FunctionEvent | None) -> set[str]:
        return set() if event is None else {event.name} | ranges_around(event.cpu_parent)

    ranges = (ranges_around(event) for event in profile.events() if collective in event.name)
    assert {"syncbn.forward", backward} <= set.union(*ranges)
