"""Catches a call of one rank that cannot be completed, and is not refused on every rank before anything has changed.

Also an error that does not name the rank and the layer, and a warning on the wrong rank.
"""

import copy
import os
import re
import sys
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equal_to_torch import forget_kernels
from torch import Tensor, nn
from training import step, unchanged
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.kernels import available, select
from syncbn.ranks.report import RanksDifferError
from syncbn.texts import warn_once

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on GPUs the others raise at a later call, see test_status.py"
)
C = 3


def check_refused(ranks: Ranks, call: Callable[[], object], layer: nn.Module, text: str) -> None:
    """Require that rank 0 raises this text, that the others report it, and that the layer has not changed."""
    faulty = ranks.rank == 0
    before = copy.deepcopy(layer.state_dict()) if not faulty else {}
    match = "" if faulty else r"another rank failed(.|\n)*rank 0: \w+Error: (.|\n)*"
    with pytest.raises((TypeError, ValueError), match=match + re.escape(text)) as raised:
        call()
    assert faulty or (str(raised.value).count(text) == 1 and raised.value.__context__ is None)
    torch.testing.assert_close({name: layer.state_dict()[name] for name in before}, before, rtol=0, atol=0)


# Arguments.


def nested() -> Tensor:
    """Return a tensor without strides: a check of its guards would abort the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.skipif("torch operations" in available(), reason="without kernels none are cached")
@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("eps", lambda: 0.0, "eps must be positive"),
        ("channel_dim", lambda: 1.0, "channel_dim must be an int, got 1.0"),
        ("input", lambda: torch.tensor(1.0), r"expected at least 2D input \(got 0D input of shape \(\)\)"),
        ("input", lambda: torch.ones(2, C, 5, device="meta"), "the input is on meta but running_mean on cpu"),
        ("input", lambda: None, "expected a Tensor as input, got NoneType"),
        ("input", lambda: [1.0], "expected a Tensor as input, got list"),
        ("input", lambda: torch.ones(2, C, 5).cfloat(), "expected a float16, bfloat16, float32 or float64 input, got"),
        ("input", lambda: torch.ones(2, C, 5).to_sparse(), "expected a dense input, got layout torch.sparse_coo"),
        ("weight", lambda: [1.0], "expected weight to be a float tensor, got list"),
        ("weight", lambda: nested(), r"weight is a NestedTensor; pass weight\.values\(\)"),
        ("running_var", lambda: nn.UninitializedBuffer(), "uninitialized"),
        ("z", lambda: nested(), r"z is a NestedTensor; pass z\.values\(\)"),
        ("mask", lambda: torch.ones(2, C, 5) > 0, r"expected mask of .* got \(2, 3, 5\)"),
        ("mask", lambda: torch.ones(2, device="meta") > 0, "the input is on cpu but mask on meta"),
        # A kernel would find these after the all_reduce alone, with which the others train.
        ("input", lambda: freed(torch.ones(2, C, 5)), "the storage of a tensor was freed"),
        ("running_mean", lambda: freed(torch.ones(C)), "the storage of a tensor was freed"),
    ],
)
def test_a_bad_argument_after_kernels_were_cached(
    ranks: Ranks, name: str, bad: Callable[[], object], message: str
) -> None:
    """The faulty rank joins the all_reduce of the others, which take the fast path. All ranks raise, and nothing
    changes."""
    good = {"running_mean": torch.zeros(C), "running_var": torch.ones(C), "weight": torch.ones(C), "eps": 1.0}
    good |= {"input": torch.randn(2 + ranks.rank, C, 5), "training": True}
    sync_batch_norm(**good)
    before, faulty = copy.deepcopy(good), ranks.rank == 0
    error = RuntimeError if faulty and message.endswith(("freed", "uninitialized")) else (TypeError, ValueError)
    with pytest.raises(error, match=message):
        sync_batch_norm(**(good | {name: bad()} if faulty else good))
    torch.testing.assert_close(good, before, rtol=0, atol=0)
    sync_batch_norm(**good)  # the group goes on
    dist.barrier()


GOOD = torch.ones(2, C, 4)


@pytest.mark.parametrize(
    ("name", "bad", "error", "message"),
    [
        ("input", GOOD[..., :1], ValueError, "expected grad_output of the input's shape"),
        ("mean", torch.ones(2), ValueError, r"expected mean of shape \(3,\), .* got \(2,\)"),
        ("output_mask", map({}.__getitem__, ["my own words"]), KeyError, "my own words"),  # of the user's own code
    ],
)
def test_a_bad_argument_of_the_backward(
    ranks: Ranks, name: str, bad: object, error: type[Exception], message: str
) -> None:
    arguments = {"grad_output": GOOD, "input": GOOD, "mean": torch.zeros(C), "invstd": torch.ones(C)}
    of_others = f"rank 0: {error.__name__}: .*{message}"
    with pytest.raises((error, ValueError), match=message if ranks.rank == 0 else of_others):
        batch_norm_backward(**arguments | ({name: bad} if ranks.rank == 0 else {}))


class TextlessError(ValueError):
    def __str__(self) -> str:
        raise AttributeError("no text")


class OwnCheck(torch.nn.modules.batchnorm._BatchNorm):
    """Has a check of its own, which raises an error in a batch of more than 3."""

    def _check_input_dim(self, input: Tensor) -> None:
        if len(input) > 3:
            raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AssertionError("my own words"), "AssertionError: my own words"),
        (AssertionError(), "AssertionError$"),
        (TextlessError(), r".*\.TextlessError: <exception str\(\) failed>$"),
        (ValueError("cannot read \udcff.png"), r"ValueError: cannot read \\udcff\.png$"),
    ],
    ids=["words", "no words", "no text", "surrogate"],
)
def test_an_own_check_may_raise_any_class(ranks: Ranks, error: Exception, text: str) -> None:
    layer, faulty = syncbn.convert_syncbn_model(OwnCheck(C)), ranks.rank == 1
    layer.error = error
    with pytest.raises(type(error) if faulty else ValueError, match=None if faulty else f"\nrank 1: {text}"):
        layer(torch.cat((GOOD, GOOD)) if faulty else GOOD)


def test_the_layer_and_every_faulty_rank_are_named(ranks: Ranks) -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), nn.BatchNorm1d(C)))
    for bad in (2, 5 + ranks.rank):  # channels of the first two ranks: alike or not
        faulty = ranks.rank < 2
        others = "ranks 0-1: V" if bad == 2 else r"rank 0: .*got 5.*\nrank 1: .*got 6"
        message = rf"^layer '1': .*got {bad}" if faulty else rf"layer '1' forward, call \d.\n{others}"
        with pytest.raises(ValueError, match=message):
            model(torch.randn(2, bad if faulty else C))


def test_a_bad_argument_in_another_layer(ranks: Ranks) -> None:
    """Every rank raises that the layers differ; the faulty rank's own error is the context."""
    first, second = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)))
    with pytest.raises(RanksDifferError, match="rank 0: in layer '0' forward, call 1\n") as raised:
        second(GOOD) if ranks.rank else first(GOOD[:, :2])
    context = raised.value.__context__
    assert context is None if ranks.rank else "expected 3 channels" in str(context)


FLAGS = {"fuse_relu": False, "channel_last": False, "track_running_stats": True}


@pytest.mark.parametrize("value", [torch.tensor([True, False]), torch.tensor(True), "no", None], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_not_a_bool(ranks: Ranks, name: str, value: object) -> None:
    """torch would raise an error for the first value on this rank alone, and "no" would count as True. Also where the
    layer has trained, so that its kernels are cached."""
    layer, x = syncbn.SyncBatchNorm(C), torch.randn(C, C, C)
    text = f"{name} must be a bool, got {value!r} of type {type(value).__name__}; pass a bool"
    for _ in range(2):
        if ranks.rank == 0:
            setattr(layer, name, value)
        check_refused(ranks, lambda: layer(x), layer, text)
        setattr(layer, name, FLAGS[name])
        layer(x)
    if ranks.rank == 0:
        setattr(layer, name, value)
        with pytest.raises(TypeError, match=re.escape(text)):
            layer.eval()(x)


@pytest.mark.parametrize("value", [0, 1, 1.0, np.True_, np.False_, np.int64(1)], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_a_number(ranks: Ranks, name: str, value: object) -> None:
    """It equals a bool on the other ranks."""
    layer, expected, x = *(syncbn.SyncBatchNorm(C) for _ in range(2)), torch.randn(C, C, C)
    setattr(layer, name, value if ranks.rank == 0 else bool(value))
    setattr(expected, name, bool(value))
    for _ in range(2):
        torch.testing.assert_close(step(layer, layer, x), step(expected, expected, x), rtol=0, atol=0)


def test_errors_need_neither_numpy_nor_the_default_device(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not depend on NumPy, and its all_gather_object does not work without."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    layer, x = syncbn.SyncBatchNorm(C), GOOD.mT if ranks.rank == 0 else GOOD
    with torch.device("meta"):
        check_refused(ranks, lambda: layer(x), layer, "expected 3 channels in dim 1 of the input, got 4")
    for make in (lambda size: syncbn.SyncBatchNorm(C, process_group=size), syncbn.create_syncbn_process_group):
        with pytest.raises(ValueError, match=rf"{ranks.size} ranks do not divide into groups of {ranks.size + 1}"):
            make(ranks.size + 1)


# Layers.


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
    "expanded mean": (buffer("running_mean", once), f"running_mean {IN_PLACE}several of its elements"),
    "with gaps": (buffer("running_var", lambda var: var.repeat_interleave(2)[::2]), ""),
    "zeros": (buffer("running_mean", lambda mean: torch._efficientzerotensor(mean.shape)), IN_PLACE + "it is a tensor"),
    "counter of flags": (buffer("num_batches_tracked", Tensor.bool), "num_batches_tracked to be a tensor of numbers"),
    "momentum": (lambda layer: setattr(layer, "momentum", 10**400), "momentum must fit into a float, got 1000"),
    "eps": (lambda layer: setattr(layer, "eps", 10**400), "eps must fit into a float, got 1000"),
    "no counter": (buffer("num_batches_tracked", int), "num_batches_tracked to be a tensor of numbers, got 0"),
    "int32 counter": (buffer("num_batches_tracked", Tensor.int), ""),
    "meta": (lambda layer: setattr(layer, "momentum", torch.ones((), device="meta")), "but momentum on meta"),
}


@pytest.mark.parametrize("before", ["", "trained", "trained in inference mode"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_cannot_be_trained(ranks: Ranks, name: str, before: str) -> None:
    """Rank 0 would otherwise fail after the others have trained, and they would wait in their backward. Kernels may be
    cached, perhaps for tensors that have the same dispatch keys in inference mode."""
    change, words = LAYERS[name]
    layer, x = syncbn.SyncBatchNorm1d(C), torch.randn(4, C)
    if before:
        with torch.inference_mode("inference" in before):
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


@pytest.mark.parametrize("name", ["input", "mask", "z"])
@pytest.mark.parametrize("mode", ["autograd", "frozen", "no_grad", "inference_mode"])
def test_inputs_of_inference_mode(ranks: Ranks, name: str, mode: str) -> None:
    """They are refused if autograd must save them, even if kernels were cached in inference mode."""
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


@pytest.mark.parametrize("num_features", [[C], -1, 2.5, C + 0.0, None])
@pytest.mark.parametrize("affine", [False, True])
def test_num_features_that_is_set_to_no_number(ranks: Ranks, num_features: object, affine: bool) -> None:
    """The value may be unhashable. The tensors of a layer have its number of channels."""
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


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("converted_before", [False, True])
def test_a_lazy_layer_that_has_loaded_its_tensors(ranks: Ranks, converted_before: bool, assign: bool) -> None:
    """Its num_features is 0. A fault of one rank must still find the number of channels that the others send."""
    layer, x = nn.LazyBatchNorm2d(), torch.randn(2, C, 4, 4)
    if converted_before:
        layer = syncbn.convert_syncbn_model(layer)
    layer.load_state_dict(nn.BatchNorm2d(C).state_dict(), assign=assign)
    layer = syncbn.convert_syncbn_model(layer)
    layer(x)
    assert layer.num_features == 0
    assert syncbn.summary(layer)[0].channels == C
    bad, text = torch.randn(2, C + 1, 4, 4), f"expected {C} channels in dim 1 of the input, got {C + 1}"
    check_refused(ranks, lambda: layer(x if ranks.rank else bad), layer, text)
    with unchanged(layer), pytest.raises(ValueError, match=text):
        layer.eval()(bad)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiles)])
def test_a_pruned_layer(ranks: Ranks, compiled: bool) -> None:
    """The program has cut its tensors, and has left num_features as it was."""
    layer, plain = syncbn.SyncBatchNorm2d(2 * C), nn.BatchNorm2d(C)
    for name, tensor in plain.state_dict(keep_vars=True).items():
        setattr(layer, name, copy.deepcopy(tensor))
    x = torch.randn(2, C, 4, 4, generator=torch.Generator().manual_seed(0))
    run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    torch.testing.assert_close(run(x), plain(x), rtol=1e-4, atol=1e-4)
    with syncbn.accumulate_running_stats(layer):
        layer(x)
    assert syncbn.summary(layer)[0][2:6] == (C, ranks.size, 8 * (2 * C + 5), 8 * (2 * C + 5))
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x), rtol=0.1, atol=0.1)


# Values that are not finite, or whose squares are not.


@pytest.mark.parametrize(("channels_last", "watched"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("dtype", "value", "beyond"),
    [
        (torch.bfloat16, 3e38, "1e19"),
        (torch.float64, 1e200, "1e154"),
        (torch.float32, 3e38, ""),  # whose squares are finite in float64
        (torch.float32, torch.nan, ""),
        (torch.float32, torch.inf, ""),
    ],
)
def test_the_rank_of_values_that_are_not_finite_warns_once(
    ranks: Ranks, dtype: torch.dtype, value: float, beyond: str, channels_last: bool, watched: bool
) -> None:
    """That rank alone warns. It is no error: as in torch, running_var becomes infinite or NaN."""
    layer = syncbn.SyncBatchNorm2d(C, dtype=torch.float64)
    x = torch.randn(4, C, 5, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    if ranks.rank == 0:
        x = x.clamp(-1, 1) * value
    warn_once.cache_clear()
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with warnings.catch_warnings(record=True) as caught, profile if watched else torch.enable_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x)
    texts = [str(warning.message) for warning in caught if "syncbn" in str(warning.message)]
    becomes_infinite = not layer.running_var.isfinite().all()
    if value != 3e38 or "C++" in available():
        assert becomes_infinite == (dtype != torch.float32 or value != 3e38)
    assert len(texts) == 2 * (becomes_infinite and ranks.rank == 0)
    if texts:
        assert texts[0] == "syncbn: NaN or infinity in the input of SyncBatchNorm2d forward, call 1 on rank 0."
        assert (f"or {dtype} values beyond about {beyond}, whose squares overflow, the" in texts[1]) == bool(beyond)


# Environment.


@pytest.mark.parametrize("call", ["layer", "backward"])
@pytest.mark.parametrize(("name", "known"), [("SYNCBN_KERNELS", "reference"), ("SYNCBN_CHECKS", "0")])
def test_an_unknown_value_of_a_variable_on_one_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, known: str, call: str
) -> None:
    select.reason_forced.cache_clear()
    forget_kernels(monkeypatch)
    monkeypatch.setenv(name, "fast" if ranks.rank == 0 else os.environ.get(name, ""))
    layer, x = syncbn.SyncBatchNorm1d(C), torch.randn(4, C)
    calls = {"layer": lambda: layer(x), "backward": lambda: batch_norm_backward(x, x, torch.zeros(C), torch.ones(C))}
    check_refused(ranks, calls[call], layer, f"{name} must be {known!r} or not set, got 'fast'")
    select.reason_forced.cache_clear()
