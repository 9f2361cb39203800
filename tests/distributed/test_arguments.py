"""Catches a call of one rank that cannot be completed, and is not refused on every rank before anything has changed.

Also a warning on the wrong rank.
"""

import copy
import os
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from equal_to_torch import forget_kernels
from torch import Tensor, nn
from training import unchanged
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward
from syncbn.texts import warn_once

C = 3
STATISTICS = torch.zeros(C), torch.ones(C)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the faulty rank raises alone")


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.detach().clone()


def parameter(layer: nn.Module, name: str, **options: bool) -> None:
    with torch.inference_mode():
        setattr(layer, name, nn.Parameter(getattr(layer, name).clone(), **options))


def buffer(name: str, change: Callable[[Tensor], object]) -> Callable[[nn.Module], object]:
    def put(layer: nn.Module) -> None:
        value = change(layer._buffers.pop(name))
        setattr(layer, name, value) if not isinstance(value, Tensor) else layer.register_buffer(name, value)

    return put


def once(tensor: Tensor) -> Tensor:
    """The same shape, with one number in memory."""
    return tensor.new_zeros(1).expand(tensor.shape)


IN_PLACE = "cannot be updated in place, as "
# What rank 0 does to its layer, and what it says; "": nothing, all train.
LAYERS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "weight of inference mode": (lambda layer: parameter(layer, "weight"), "weight was made in torch.inference_mode"),
    "frozen": (lambda layer: parameter(layer, "weight", requires_grad=False), "weight was made in torch.inference"),
    "bias of inference mode": (lambda layer: parameter(layer, "bias"), ""),  # nothing saves it
    **{
        f"{name} of inference mode": (buffer(name, inference), f"{name} {IN_PLACE}it was made in torch.inference_mode")
        for name in ("running_mean", "running_var", "num_batches_tracked")
    },
    "expanded mean": (buffer("running_mean", once), f"running_mean {IN_PLACE}several of its numbers"),
    "with gaps": (buffer("running_var", lambda var: var.repeat_interleave(2)[::2]), ""),
    "zeros": (buffer("running_mean", lambda mean: torch._efficientzerotensor(mean.shape)), IN_PLACE + "it is a tensor"),
    "counter of flags": (buffer("num_batches_tracked", Tensor.bool), "num_batches_tracked to be a tensor of numbers"),
    "momentum": (lambda layer: setattr(layer, "momentum", 10**400), "momentum must fit into a float, got 1000"),
    "eps": (lambda layer: setattr(layer, "eps", 10**400), "eps must fit into a float, got 1000"),
    "no counter": (buffer("num_batches_tracked", int), "num_batches_tracked to be a tensor of numbers, got 0"),
    "int32 counter": (buffer("num_batches_tracked", Tensor.int), ""),
    "meta": (lambda layer: setattr(layer, "momentum", torch.ones((), device="meta")), "but momentum on meta"),
}


def check_refused(ranks: Ranks, call: Callable[[], object], layer: nn.Module, words: str) -> None:
    """Rank 0 raises it, the others that it does; the layer is as before."""
    faulty = ranks.rank == 0
    before = copy.deepcopy(layer.state_dict()) if not faulty else {}
    match = "" if faulty else r"another rank failed(.|\n)*rank 0: \w+Error: (.|\n)*"
    with pytest.raises((TypeError, ValueError), match=match + re.escape(words)):
        call()
    torch.testing.assert_close({name: layer.state_dict()[name] for name in before}, before, rtol=0, atol=0)


@on_cpu
@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_cannot_be_trained(ranks: Ranks, name: str, trained_before: bool) -> None:
    """Otherwise rank 0 would fail when the others have trained, and wait in their backward."""
    change, words = LAYERS[name]
    layer, x = syncbn.SyncBatchNorm1d(C), torch.randn(4, C)
    if trained_before:  # so that there is a plan
        layer(x)
        layer.reset_running_stats()
    if ranks.rank == 0:
        change(layer)
    if words:
        check_refused(ranks, lambda: layer(x), layer, words)
    else:
        layer(x).sum().backward()
    if ranks.rank == 0 and words and isinstance(layer.running_mean, Tensor):
        assert not layer.running_mean.any()
    syncbn.SyncBatchNorm1d(C)(x)  # the group goes on


@on_cpu
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad"])
def test_a_layer_of_inference_mode_outside_of_it(ranks: Ranks, mode: str) -> None:
    """Also where a plan was made inside, with tensors from outside, whose dispatch keys are the same there. Rank 0
    would raise alone behind the all_reduce, or move buffers that autograd does not let it."""
    layer, x = syncbn.SyncBatchNorm1d(C), torch.randn(4, C)
    with torch.inference_mode():
        layer(x)
    layer.reset_running_stats()
    if ranks.rank == 0:
        for name in ("weight", "bias"):
            parameter(layer, name)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer(name, inference)(layer)
        x = inference(x)
    with getattr(torch, mode)():
        check_refused(ranks, lambda: layer(x), layer, f"running_mean {IN_PLACE}it was made in torch.inference_mode()")
    assert not layer.running_mean.any()


@on_cpu
@pytest.mark.parametrize("name", ["input", "mask", "z"])
@pytest.mark.parametrize("mode", ["autograd", "frozen", "no_grad", "inference_mode"])
def test_inputs_of_inference_mode(ranks: Ranks, name: str, mode: str) -> None:
    """They are refused where autograd must save them, also where a plan was made in inference mode."""
    layer = syncbn.SyncBatchNorm1d(C).requires_grad_(mode != "frozen")
    tensors = {"input": torch.randn(4, C), "z": torch.randn(4, C), "mask": torch.ones(4, dtype=torch.bool)}
    with torch.inference_mode():
        layer(**{key: inference(tensor) for key, tensor in tensors.items() if key in ("input", name)})
    if ranks.rank == 0:
        tensors[name] = inference(tensors[name])
    given = {key: tensor for key, tensor in tensors.items() if key in ("input", name)}
    if mode == "autograd" and name != "z":
        check_refused(ranks, lambda: layer(**given), layer, f"{name} was made in torch.inference_mode()")
        layer(**{key: tensor.clone() for key, tensor in given.items()}).sum().backward()  # the remedy
    elif mode in ("autograd", "frozen"):
        y = layer(**given)
        assert y.requires_grad == (mode == "autograd")
    else:
        with getattr(torch, mode)():
            layer(**given)
    assert layer.num_batches_tracked == 2


# What the number of channels is read from.


@on_cpu
@pytest.mark.parametrize("num_features", [[C], "text", -1, 2.5, C + 0.0, None])
@pytest.mark.parametrize("affine", [False, True])
def test_num_features_that_is_set_to_no_number(ranks: Ranks, num_features: object, affine: bool) -> None:
    """It may not be hashable, and is no number of channels to send. Tensors of a layer tell its channels."""
    layer, x = syncbn.SyncBatchNorm1d(C, affine=affine, track_running_stats=affine), torch.randn(4, C)
    layer(x)
    if ranks.rank == 0:
        layer.num_features = num_features
    if affine or num_features in (C, None):
        layer(x)
    else:
        check_refused(
            ranks, lambda: layer(x), layer, f"expected {num_features} channels in dim 1 of the input, got {C}"
        )
    syncbn.SyncBatchNorm1d(C)(x)  # the group goes on


@on_cpu
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("converted_before", [False, True])
def test_num_features_is_not_believed(ranks: Ranks, converted_before: bool, assign: bool) -> None:
    """A lazy layer that has loaded its tensors has num_features 0; torch's layers train. A fault of one rank must still
    find the number of channels that the others send."""
    of, x = nn.BatchNorm2d(C), torch.randn(2, C, 4, 4)
    layer = nn.LazyBatchNorm2d()
    if converted_before:
        layer = syncbn.convert_syncbn_model(layer)
    layer.load_state_dict(of.state_dict(), assign=assign)
    layer = syncbn.convert_syncbn_model(layer)
    assert layer.num_features == 0
    layer(x)
    assert layer.num_features == 0
    assert syncbn.summary(layer)[0].channels == C
    bad = torch.randn(2, C + 1, 4, 4) if ranks.rank == 0 else x
    check_refused(ranks, lambda: layer(bad), layer, f"expected {C} channels in dim 1 of the input, got {C + 1}")
    with unchanged(layer), pytest.raises(ValueError, match=f"expected {C} channels in dim 1 of the input, got {C + 1}"):
        layer.eval()(torch.randn(2, C + 1, 4, 4))
    layer(x)


@on_cpu
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiles)])
def test_a_pruned_layer(ranks: Ranks, compiled: bool) -> None:
    """Its tensors have been cut by hand; its num_features have not."""
    layer, plain = syncbn.SyncBatchNorm2d(2 * C), nn.BatchNorm2d(C)
    for name, tensor in plain.state_dict(keep_vars=True).items():
        setattr(layer, name, copy.deepcopy(tensor))
    x = torch.randn(2, C, 4, 4, generator=torch.Generator().manual_seed(0))
    run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    torch.testing.assert_close(run(x), plain(x), rtol=1e-4, atol=1e-4)
    with syncbn.accumulate_running_stats(layer):
        layer(x)
    assert syncbn.summary(layer)[0][2:6] == (C, ranks.size, 8 * (2 * C + 4), 8 * (2 * C + 4))
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x), rtol=0.1, atol=0.1)


# Values beyond what their squares can be.


@on_cpu
@pytest.mark.parametrize(("channels_last", "watched"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("dtype", "value", "beyond"),
    [(torch.bfloat16, 3e38, "1e19"), (torch.float64, 1e200, "1e154"), (torch.float32, 3e38, None)],
)
def test_squares_that_overflow_are_warned_of(
    ranks: Ranks, dtype: torch.dtype, value: float, beyond: str | None, channels_last: bool, watched: bool
) -> None:
    """Their rank alone warns, although its input is finite. y would be 0 and running_var infinite without a word."""
    layer = syncbn.SyncBatchNorm2d(C, dtype=torch.float64)
    x = torch.randn(4, C, 5, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    if ranks.rank == 0:
        x = x.clamp(-1, 1) * value
    assert x.isfinite().all()
    warn_once.cache_clear()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with warnings.catch_warnings(record=True) as caught, profile if watched else torch.enable_grad():
        warnings.simplefilter("always")
        layer(x)
    said = [str(warning.message) for warning in caught if "syncbn" in str(warning.message)]
    overflows = not layer.running_var.isfinite().all()
    assert overflows == (beyond is not None and (dtype != torch.bfloat16 or "C++" in syncbn.kernels.available()))
    assert len(said) == 2 * (overflows and ranks.rank == 0)
    if said:
        assert said[0] == "syncbn: NaN or infinity in the input of SyncBatchNorm2d forward, call 1 on rank 0."
        assert f"or {dtype} values beyond about {beyond}, whose squares overflow, makes the statistics" in said[1]


# Environment.


@on_cpu
@pytest.mark.parametrize("call", ["layer", "backward"])
@pytest.mark.parametrize(("name", "known"), [("SYNCBN_KERNELS", "reference"), ("SYNCBN_CHECKS", "0")])
def test_an_unknown_value_of_a_variable_on_one_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, known: str, call: str
) -> None:
    from syncbn.kernels import select

    select.why_forced.cache_clear()
    forget_kernels(monkeypatch)
    monkeypatch.setenv(name, "fast" if ranks.rank == 0 else os.environ.get(name, ""))
    layer, x = syncbn.SyncBatchNorm1d(C), torch.randn(4, C)
    calls = {"layer": lambda: layer(x), "backward": lambda: batch_norm_backward(x, x, *STATISTICS)}
    check_refused(ranks, calls[call], layer, f"{name} must be {known!r} or not set, got 'fast'")
    select.why_forced.cache_clear()
