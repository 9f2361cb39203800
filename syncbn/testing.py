"""Compares training on W ranks with training in one process on the whole batch.

`assert_matches_full_batch`, for tests, starts ranks that run `differences`. `python -m syncbn check` runs `differences`
on ranks that torchrun has started.
"""

import copy
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import timedelta
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.layer import SyncBatchNorm
from syncbn.unconverted import unsynchronised

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
LEARNING_RATE = 0.01
MAX_LINES = 10  # The number of tensors or layers that an error lists.
START_METHOD = "spawn"  # Ranks inherit the environment variables of this process, but none of its state.

Batch: TypeAlias = Sequence[Tensor]  # The model's input, then the other arguments of the loss.
Loss: TypeAlias = Callable[..., Tensor]


class Difference(NamedTuple):
    """The largest difference, over the ranks, between a tensor on W ranks and the tensor in one process."""

    what: str  # "loss", "output", "gradient", "parameter" or "buffer"
    name: str  # Dotted name in the model; "of step N" for a loss or output.
    error: float  # max |a - b|, a on the ranks and b in one process.
    scale: float  # max |b| over all tensors with the same `what`.

    @property
    def relative(self) -> float:
        """error / scale; 0 if both are 0."""
        return self.error / self.scale if self.scale else (torch.inf if self.error else 0.0)


def assert_matches_full_batch(
    model_fn: Callable[[], nn.Module], batch: Batch, loss_fn: Loss, world_size: int = 2, *, steps: int = 2,
    dtype: torch.dtype = torch.float64, tolerance: float | None = None, timeout: float = 60.0,
) -> None:  # fmt: skip
    """Assert that training on `world_size` ranks gives the same results as training in one process.

    The function starts the ranks on CPU with gloo. Each rank trains on its slice of the batch under
    DistributedDataParallel, and then on the whole batch with nn.BatchNorm instead of synchronised layers. (Layers that
    were built as syncbn layers, or that have a mask, a residual, `fuse_relu` or `channel_last`, are kept, with
    process_group=1.) After `steps` SGD steps, losses, outputs, gradients, parameters and buffers must agree.

        def test_trains_as_one():
            batch = torch.randn(6, 3, 32, 32), torch.randint(10, (6,))
            assert_matches_full_batch(build_model, batch, F.cross_entropy, world_size=2)

    Args:
        model_fn: function that returns the model ready for training, converted and with frozen layers frozen. Each rank
            calls it after torch.manual_seed(0), so it must be importable from sys.path, and not a lambda. All ranks
            start with the parameters and buffers of rank 0.
        batch: tensors (N, ...), N at least `world_size`: the model's input, then the other arguments of `loss_fn`. Each
            rank takes a slice of dim 0; the sizes of the slices differ by at most 1. A model with several inputs needs
            a wrapper that takes them as one tensor; the wrapper may also compute the loss.
        loss_fn: importable function; `loss_fn(model(batch[0]), *batch[1:])` is a mean over samples, such as
            F.cross_entropy.
        world_size: number of ranks, >= 1.
        steps: number of training steps, >= 1, all on the same batch.
        dtype: torch.float64 or torch.float32, to which the model and floating-point tensors are converted.
        tolerance: bound of `max |a - b| / max |b|`, by default 1e-9 in float64 and 1e-4 in float32.
        timeout: seconds that a rank waits for another rank.

    Models that call `syncbn.functional` fail, because the functions also communicate in the run on the whole batch.
    Dropout is off. Models whose forward uses other random numbers fail.

    Raises:
        AssertionError: tensors differ; the error gives the tensors, how much they differ, and the layers that are not
            synchronised.
        ValueError, TypeError: an argument is invalid.
        torch.multiprocessing.ProcessRaisedException: a rank failed; the error contains its traceback.
        torch.multiprocessing.ProcessExitedException: a rank could not import `model_fn`, for example in pytest's
            importlib mode; standard error shows the reason.
    """
    _check(batch, world_size, dtype, steps)
    for name, function in (("model_fn", model_fn), ("loss_fn", loss_fn)):
        if not callable(function) or (name == "model_fn" and isinstance(function, nn.Module)):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"{name} must be importable from a module, got {function!r}: {error}") from error
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = world_size, store.port, timeout, (model_fn, tuple(batch), loss_fn, steps, dtype)
    start_processes(_run_rank, arguments, nprocs=world_size, start_method=START_METHOD)
    rows, local = json.loads(store.get("differences"))
    measured = [Difference(*row) for row in rows]
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    if bad := [difference for difference in measured if not difference.relative <= allowed]:  # `not <=`: NaN is bad.
        raise AssertionError(_report(bad, measured, local, world_size, allowed))


def differences(model: nn.Module, batch: Batch, loss_fn: Loss, steps: int = 2) -> tuple[list[Difference], nn.Module]:
    """Return how W ranks and one process differ after `steps` training steps, and the model that the ranks trained.

    All ranks call this with the same batch. The arguments are those of `assert_matches_full_batch`, converted to one
    dtype and device. A copy of rank 0's model is trained. Without a process group, this process trains twice: with
    synchronised layers and with nn.BatchNorm.
    """
    world, rank, size = dist.group.WORLD, 0, 1
    model = data_parallel = copy.deepcopy(model)
    if world is not None:  # DistributedDataParallel copies the parameters and buffers of rank 0 to all ranks.
        data_parallel, rank, size = nn.parallel.DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    reference, irreplaceable = copy.deepcopy(model), _irreplaceable_layers(model)
    slices = [tensor.tensor_split(size)[rank] for tensor in batch]
    share = len(slices[0]) * size / len(batch[0])  # With this factor the mean over ranks is the mean over samples.
    on_ranks = _train(data_parallel, slices, loss_fn, steps, share)
    for name, layer in reference.named_modules():
        if isinstance(layer, SyncBatchNorm) and model.get_submodule(name) not in irreplaceable:
            revert_syncbn_model(layer)
        if isinstance(layer, (nn.SyncBatchNorm, SyncBatchNorm)):
            convert_syncbn_model(layer, 1)
    on_one = _train(reference, batch, loss_fn, steps)

    pairs: list[tuple[str, str, Tensor, Tensor]] = []  # what, name, the tensor on the ranks, the tensor in one process
    for step, ((output, loss), (expected, expected_loss)) in enumerate(zip(on_ranks, on_one, strict=True), 1):
        if world is not None:
            dist.all_reduce(loss)
        pairs.append(("loss", f"of step {step}", loss / size, expected_loss))
        # All ranks take the same branch, because `expected` is the output for the whole batch.
        if isinstance(expected, Tensor) and expected.ndim and len(expected) == len(batch[0]):
            pairs.append(("output", f"of step {step}", output, expected.tensor_split(size)[rank]))
    for (name, parameter), expected_parameter in zip(model.named_parameters(), reference.parameters(), strict=True):
        if parameter.grad is not None and expected_parameter.grad is not None:
            pairs.append(("gradient", name, parameter.grad, expected_parameter.grad))
        pairs.append(("parameter", name, parameter, expected_parameter))
    for (name, buffer), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
        pairs.append(("buffer", name, buffer, expected))
    return _compare(pairs, world), model


def unequal(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors whose bytes differ between ranks. Issues two all_reduces per tensor."""
    names = []
    for name, tensor in tensors.items():
        lowest = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
        highest = lowest.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        if not torch.equal(lowest, highest):
            names.append(name)
    return names


def _train(model: nn.Module, batch: Batch, loss_fn: Loss, steps: int, share: float = 1.0) -> list[tuple[Any, Tensor]]:
    """Return the output and the loss of each SGD step. The loss is multiplied by `share`."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(batch[0].clone())  # The model may change its input in place.
        loss = loss_fn(output, *batch[1:]) * share
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, the mean over samples, got shape {tuple(loss.shape)}")
        torch.autograd.backward(loss)
        optimizer.step()
        results.append((output, loss.detach()))
    return results


def _compare(pairs: list[tuple[str, str, Tensor, Tensor]], world: dist.ProcessGroup | None) -> list[Difference]:
    measured = []  # The error and scale of each pair.
    for *_, actual, expected in pairs:
        both = torch.stack((actual.detach().double() - expected.detach().double(), expected.detach().double()))
        measured.append(both.reshape(2, -1).abs().amax(1) if both.numel() else both.new_zeros(2))
    largest = torch.stack(measured)
    if world is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=world)
    rows = [Difference(*pair[:2], *both) for pair, both in zip(pairs, largest.tolist(), strict=True)]
    # A gradient that is 0 up to rounding, such as the gradient of a bias before batch norm, has no useful scale.
    scales = {what: max(row.scale for row in rows if row.what == what) for what, *_ in rows}
    return [row._replace(scale=scales[row.what]) for row in rows]


def _irreplaceable_layers(model: nn.Module) -> set[nn.Module]:
    """Return the layers that are not reverted to nn.BatchNorm: those that were built as syncbn layers, and those with
    options that nn.BatchNorm does not have. Layers are added when the model calls them with a mask or a residual."""
    layers = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    irreplaceable: set[nn.Module] = {
        layer for layer in layers if layer.fuse_relu or layer.channel_last or "_original_class" not in vars(layer)
    }

    def add_called(layer: nn.Module, args: Sized, kwargs: Sized) -> None:
        if len(args) + len(kwargs) > 1:
            irreplaceable.add(layer)

    for layer in layers:
        layer.register_forward_pre_hook(add_called, with_kwargs=True)
    return irreplaceable


def _run_rank(rank: int, world_size: int, port: int, timeout: float, training: tuple[Any, ...]) -> None:
    """Run `differences` in a process that `assert_matches_full_batch` has started; rank 0 stores the result."""
    model_fn, batch, loss_fn, steps, dtype = training
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in sizes.items()})  # torchrun sets the same variables.
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
    torch.manual_seed(0)
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_fn must return an nn.Module, got {type(model).__name__}")
    model.to(dtype)
    batch = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch]
    measured, _ = differences(model, batch, loss_fn, steps)
    if rank == 0:
        store.set("differences", json.dumps((measured, local_layers(model))))
    del model
    dist.destroy_process_group()


def local_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers of `model` that normalise each rank's batch alone."""
    layers = [(name, layer) for name, layer, _ in unsynchronised(model) if not isinstance(layer, nn.SyncBatchNorm)]
    return [name or "the model" for name, layer in layers if layer.training]


def _report(bad: list[Difference], rows: list[Difference], local: list[str], world_size: int, allowed: float) -> str:
    lines = [
        f"{len(bad)} of {len(rows)} tensors on {world_size} ranks differ from those of one process on the whole batch "
        f"(by more than {allowed:g} times their scale, the largest value of the same kind):"
    ]
    for row in bad[:MAX_LINES]:
        lines.append(f"{row.what} {row.name}: {row.error:.3g} apart, {row.relative:.3g} times the scale")
    if len(bad) > MAX_LINES:
        lines.append(f"and {len(bad) - MAX_LINES} more")
    if local:
        names = ", ".join(map(repr, local[:MAX_LINES]))
        remedy = "call syncbn.convert_syncbn_model(model), which warns about layers that it cannot convert"
        lines.append(f"Layers that are not synchronised: {names}; {remedy}")
    in_first_step = {difference.what: difference in bad for difference in rows if difference.name == "of step 1"}
    if in_first_step["loss"] and not in_first_step.get("output", True):
        lines.append("The outputs agree and the losses do not: loss_fn must be the mean over samples")
    return "\n".join(lines)


def _check(batch: Batch, world_size: int, dtype: torch.dtype, steps: int) -> None:
    if isinstance(batch, Tensor) or not batch or not all(isinstance(part, Tensor) and part.ndim for part in batch):
        raise TypeError("batch must be a tuple of tensors of >= 1 dim: the input, then the other arguments of loss_fn")
    lengths = [len(tensor) for tensor in batch]
    if len(set(lengths)) > 1:
        raise ValueError(f"the tensors of a batch must have the same length, got {lengths}")
    if not isinstance(world_size, Integral) or not 1 <= world_size <= lengths[0]:
        raise ValueError(f"world_size must be from 1 to the number of samples, {lengths[0]}, got {world_size!r}")
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, TOLERANCES))}, got {dtype}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
