"""Catches a step whose results are not the whole batch's, beyond what test_fuzz.py draws, and needless collectives."""

from collections import OrderedDict

import pytest
import torch
from oracle import HARD_INPUTS, errors_of_one_step, full_batch, relative_error
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from training import CountCollectives
from voting import Ranks

import syncbn


def test_a_rank_without_a_gradient_still_communicates(ranks: Ranks) -> None:
    """Autograd then calls backward with None; the others wait for this rank's zeros."""
    layer = syncbn.SyncBatchNorm(3, dtype=torch.float64, device=ranks.device)
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, 3, dtype=torch.float64, device=ranks.device)
    mine = ranks.even(len(x))
    my_x = x[mine].requires_grad_()
    y = layer(my_x)
    (torch._C._functions.UndefinedGrad()(y) if ranks.rank == 0 else y).sin().sum().backward()
    dy = torch.cos(full_batch(x, x).output)
    dy[:2] = 0
    assert relative_error(my_x.grad, full_batch(x, dy).grad_input[mine]) < 1e-12


@pytest.mark.parametrize("name", [1300 * "a", 230 * "\u5c42", 110 * "\U0001f600", "\udcff"], ids=ascii)
def test_names_of_layers(ranks: Ranks, name: str) -> None:
    """The store and the signature once refused a surrogate."""
    model = nn.Sequential(OrderedDict([(name, nn.BatchNorm1d(3, device=ranks.device))]))
    syncbn.convert_syncbn_model(model)(torch.ones(2, 3, device=ranks.device) * ranks.rank)


@pytest.mark.parametrize("case", HARD_INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_hard_inputs(ranks: Ranks, case: str, dtype: torch.dtype) -> None:
    """float32 sums of squares lose everything at mean/std = 1e4; float64 sums about zero keep float32 exact."""
    errors = errors_of_one_step(case, dtype, syncbn.functional.sync_batch_norm, ranks.rank, ranks.size, ranks.device)
    bound = 1e-6
    if dtype == torch.float64:
        bound = 1e-12 if case == "N(0, 1)" else 2e-15 * (1 + errors.mean_over_std**2)
    for name, error in errors.relative.items():
        assert error <= bound, (case, name, error)


def test_profiler_ranges_hold_the_all_reduce(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    x = torch.randn(2, 3, device=ranks.device, requires_grad=True)
    with torch.profiler.profile(acc_events=True) as profile:  # without it torch 2.11 warns
        layer(x).sum().backward()

    # _StepBackward is autograd's, see docs/gpu.md.
    on_cpu = ranks.device.type == "cpu"
    collective, of_backward = ("alltoall", "syncbn.backward") if on_cpu else ("allreduce", "_StepBackward")

    def names_around(event: FunctionEvent | None) -> list[str]:
        return [] if event is None else [event.name, *names_around(event.cpu_parent)]

    inside = [names_around(event) for event in profile.events() if collective in event.name]
    assert {"syncbn.forward", of_backward} <= {name for names in inside for name in names}


def test_uneven_spatial_sizes(ranks: Ranks) -> None:
    """Statistics weight values, not ranks: the oracle gets all pixels of all ranks as one row of pixels."""
    torch.manual_seed(0)
    pixels = [torch.randn(2, 3, 4 + rank, 3, dtype=torch.float64) for rank in range(ranks.size)]
    rows = torch.cat([image.movedim(1, -1).reshape(-1, 3) for image in pixels])
    expected = full_batch(rows, torch.cos(rows))
    x = pixels[ranks.rank].to(ranks.device).requires_grad_()
    layer = syncbn.SyncBatchNorm2d(3, dtype=torch.float64, device=ranks.device)
    y = layer(x)
    y.backward(torch.cos(x.detach()))
    own = ranks.slices([image.numel() // 3 for image in pixels])
    for actual, wanted in ((y.detach(), expected.output), (x.grad, expected.grad_input)):
        assert relative_error(actual.cpu().movedim(1, -1).reshape(-1, 3), wanted[own]) < 1e-12
    assert relative_error(layer.running_var.cpu(), expected.running_var) < 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:syncbn. .*NaN or infinity")
def test_nan_and_inf_are_those_of_the_concatenated_batch(ranks: Ranks, bad: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, 3, 4, dtype=torch.float64)
    x[-1, 1, 2] = bad  # on the last rank
    plain, own = nn.BatchNorm1d(3, dtype=torch.float64), ranks.even(len(x))
    layer = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device)
    torch.testing.assert_close(layer(x[own].to(ranks.device)).cpu(), plain(x)[own], equal_nan=True)
    torch.testing.assert_close(layer.cpu().state_dict(), plain.state_dict(), equal_nan=True)


def test_two_forwards_before_one_backward_and_retain_graph(ranks: Ranks) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(2, 2 * ranks.size, 3, dtype=torch.float64)
    layer, own = syncbn.SyncBatchNorm1d(3, dtype=torch.float64, device=ranks.device), ranks.even(len(first))
    a, b = (x[own].to(ranks.device).requires_grad_() for x in (first, second))
    loss = (layer(a).sin() + layer(b).cos()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for mine, x, slope in ((a, first, torch.cos), (b, second, lambda y: -torch.sin(y))):
        expected = full_batch(x, slope(full_batch(x, x).output)).grad_input
        assert relative_error(mine.grad.cpu(), 2 * expected[own]) < 1e-12


def values_that_count(tensor: Tensor, mask: Tensor) -> Tensor:
    """(N, C, ...) -> (M, C), for a mask (N, ...) that is True M times."""
    return tensor.movedim(1, -1)[mask]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """(M, C) -> (N, C, ...), zero where nothing counts."""
    tensor = values.new_zeros(*mask.shape, values.shape[1])
    tensor[mask] = values
    return tensor.movedim(-1, 1)


@pytest.mark.parametrize("track_running_stats", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_with_a_mask(ranks: Ranks, track_running_stats: bool, fused: bool) -> None:
    """By the running statistics, or without them by what counts in this rank's batch; nothing is communicated."""
    torch.manual_seed(ranks.rank)
    layer = syncbn.SyncBatchNorm(3, track_running_stats=track_running_stats, fuse_relu=fused).double().eval()
    layer.to(ranks.device)
    x, z = torch.randn(2, 4, 3, 5, 6, dtype=torch.float64, device=ranks.device)
    mask = torch.rand(4, 5, 6, device=ranks.device) < 0.6
    x, z = (one.masked_fill(~mask[:, None], torch.nan) for one in (x, z))
    x.requires_grad_()
    with CountCollectives() as counted:
        y = layer(x, z, mask=mask)
        dy = torch.full_like(y, torch.nan).masked_fill(mask[:, None], 2.0)
        gradients = torch.autograd.grad(y, (x, layer.weight), dy)
    assert counted.total == 0
    valid = values_that_count(x, mask).detach().requires_grad_()
    expected = layer(valid, values_that_count(z, mask))
    of_x_that_counts, of_weight = torch.autograd.grad(expected.sum() * 2, (valid, layer.weight))
    torch.testing.assert_close((y, *gradients), (spread(expected, mask), spread(of_x_that_counts, mask), of_weight))
