"""Compares training on W ranks with training on one process that has the whole batch.

`assert_matches_full_batch` starts the ranks, for tests. Each runs `differences`, which `python -m syncbn check` runs on
the ranks that torchrun has started.
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
MAX_LINES = 10  # tensors that an error names
START_METHOD = "spawn"  # the ranks get the environment of this process and none of its state

Batch: TypeAlias = Sequence[Tensor]  # the model's input, and what else the loss takes
Loss: TypeAlias = Callable[..., Tensor]


class Difference(NamedTuple):
    """The difference of one tensor between W ranks and one process: the largest over ranks."""

    what: str  # loss, output, gradient, parameter, buffer
    name: str  # of the tensor in the model; of a loss, its step
    error: float  # max |a - b|
    scale: float  # max |b| of the tensors of its kind

    @property
    def relative(self) -> float:
        """error / scale; 0 where both are 0."""
        return self.error / self.scale if self.scale else (torch.inf if self.error else 0.0)


def assert_matches_full_batch(
    model_fn: Callable[[], nn.Module], batch: Batch, loss_fn: Loss, world_size: int = 2, *, steps: int = 2,
    dtype: torch.dtype = torch.float64, tolerance: float | None = None, timeout: float = 60.0,
) -> None:  # fmt: skip
    """Prove that a model trains on `world_size` ranks as on one process: start them, on CPU and gloo, and compare.

    Each rank trains on its slice of the batch under DistributedDataParallel, and beside that on the whole batch with
    nn.BatchNorm in the place of synchronised layers. (Layers that do what nn.BatchNorm cannot, with a mask, a residual,
    `fuse_relu` or `channel_last`, and layers that were built as syncbn's stay, each over its own rank.) After `steps`
    steps of SGD losses, gradients, running statistics and parameters must agree.

        def test_trains_as_one():
            batch = torch.randn(6, 3, 32, 32), torch.randint(10, (6,))
            assert_matches_full_batch(build_model, batch, F.cross_entropy, world_size=2)

    Args:
        model_fn: returns the model as it is trained, with `convert_syncbn_model`, frozen layers and all. Importable
            from sys.path, and so not a lambda: it is called on each rank, after torch.manual_seed(0). What it draws
            otherwise is rank 0's.
        batch: tensors (N, ...), N at least `world_size`: the model's input, and what else `loss_fn` takes. Ranks take
            slices of dim 0, whose sizes differ by 1 where N is no multiple. For a model with two inputs write a module
            that takes them as one tensor, or that computes the loss: its input is then a batch of one tensor.
        loss_fn: `loss_fn(model(batch[0]), *batch[1:])` is the mean over samples, as F.cross_entropy's. Importable.
        world_size: ranks to start.
        steps: of training, with the same batch.
        dtype: to which model and floating tensors are converted: float64, where equality shows, or float32.
        tolerance: of `max |a - b| / max |b|`, 1e-9 in float64 and 1e-4 in float32 by default.
        timeout: seconds that a rank waits for another.

    A model that calls `syncbn.functional` itself differs: the functions synchronise on the whole batch too. Dropout is
    off. Anything else that is random in the forward makes the model differ from itself.

    Raises:
        AssertionError: which tensors differ and by how much, and which layers are not synchronised.
        ValueError, TypeError: a bad argument.
        torch.multiprocessing.ProcessRaisedException: a rank failed, with its traceback. (ProcessExitedException where
            it could not even import `model_fn`, as in pytest's importlib mode; standard error says why.)
    """
    _check(batch, world_size, dtype, steps)
    for name, function in (("model_fn", model_fn), ("loss_fn", loss_fn)):
        if not callable(function) or (name == "model_fn" and isinstance(function, nn.Module)):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            words = "must be importable where the ranks start, at the top level of a module, got"
            raise TypeError(f"{name} {words} {function!r}: {error}") from error
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = world_size, store.port, timeout, (model_fn, tuple(batch), loss_fn, steps, dtype)
    start_processes(_run_rank, arguments, nprocs=world_size, start_method=START_METHOD)
    rows, local = json.loads(store.get("differences"))
    measured = [Difference(*row) for row in rows]
    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    if bad := [difference for difference in measured if not difference.relative <= allowed]:  # also NaN
        raise AssertionError(_report(bad, measured, local, world_size, allowed))


def differences(model: nn.Module, batch: Batch, loss_fn: Loss, steps: int = 2) -> tuple[list[Difference], nn.Module]:
    """How W ranks and one process differ after `steps` steps of training. All ranks call this with the same batch.

    Arguments as of `assert_matches_full_batch`, converted to one dtype and device already. A copy of rank 0's model is
    trained and returned. Without a process group, one process is compared with itself, synchronised layers with
    nn.BatchNorm.
    """
    world, rank, size = dist.group.WORLD, 0, 1
    model = data_parallel = copy.deepcopy(model)
    if world is not None:  # DistributedDataParallel gives all ranks rank 0's tensors
        data_parallel, rank, size = nn.parallel.DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    reference, irreplaceable = copy.deepcopy(model), _irreplaceable_layers(model)
    slices = [tensor.tensor_split(size)[rank] for tensor in batch]
    share = len(slices[0]) * size / len(batch[0])  # makes the mean over ranks the mean over samples
    on_ranks = _train(data_parallel, slices, loss_fn, steps, share)
    for name, layer in reference.named_modules():
        if isinstance(layer, SyncBatchNorm) and model.get_submodule(name) not in irreplaceable:
            revert_syncbn_model(layer)
        if isinstance(layer, (nn.SyncBatchNorm, SyncBatchNorm)):
            convert_syncbn_model(layer, 1)
    on_one = _train(reference, batch, loss_fn, steps)

    pairs: list[tuple[str, str, Tensor, Tensor]] = []  # what, name, of W ranks, of one process
    for step, ((output, loss), (expected, expected_loss)) in enumerate(zip(on_ranks, on_one, strict=True), 1):
        if world is not None:
            dist.all_reduce(loss)
        pairs.append(("loss", f"of step {step}", loss / size, expected_loss))
        # The same on all ranks.
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
    """Return the names of the tensors that are not the same on all ranks, byte by byte. Two all_reduces a tensor."""
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
    """The output and the loss of each of these steps of SGD; the loss is multiplied by `share`."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(batch[0].clone())  # the model may change its input in place
        loss = loss_fn(output, *batch[1:]) * share
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return one number, the mean over samples, got shape {tuple(loss.shape)}")
        torch.autograd.backward(loss)
        optimizer.step()
        results.append((output, loss.detach()))
    return results


def _compare(pairs: list[tuple[str, str, Tensor, Tensor]], world: dist.ProcessGroup | None) -> list[Difference]:
    measured = []  # error and scale of each pair
    for *_, actual, expected in pairs:
        both = torch.stack((actual.detach().double() - expected.detach().double(), expected.detach().double()))
        measured.append(both.reshape(2, -1).abs().amax(1) if both.numel() else both.new_zeros(2))
    largest = torch.stack(measured)
    if world is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=world)
    rows = [Difference(*pair[:2], *both) for pair, both in zip(pairs, largest.tolist(), strict=True)]
    # The scale is that of all tensors of a kind: a gradient that should be 0, as of a bias before batch norm, is noise.
    scales = {what: max(row.scale for row in rows if row.what == what) for what, *_ in rows}
    return [row._replace(scale=scales[row.what]) for row in rows]


def _irreplaceable_layers(model: nn.Module) -> set[nn.Module]:
    """The layers that nn.BatchNorm cannot replace. The set grows while the model runs, by the layers that are called
    with a mask or a residual."""
    layers = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    irreplaceable: set[nn.Module] = {layer for layer in layers if layer.fuse_relu or layer.channel_last}

    def note(layer: nn.Module, args: Sized, kwargs: Sized) -> None:
        if len(args) + len(kwargs) > 1:
            irreplaceable.add(layer)

    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    return irreplaceable


def _run_rank(rank: int, world_size: int, port: int, timeout: float, training: tuple[Any, ...]) -> None:
    """Trains in a process that `assert_matches_full_batch` has started. `training`: its arguments from model_fn on."""
    model_fn, batch, loss_fn, steps, dtype = training
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in sizes.items()})  # as torchrun does
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
    """The names of the layers of `model` that normalise each rank's batch alone."""
    layers = [(name, layer) for name, layer, _ in unsynchronised(model) if not isinstance(layer, nn.SyncBatchNorm)]
    return [name or "the model" for name, layer in layers if layer.training]


def _report(bad: list[Difference], rows: list[Difference], local: list[str], world_size: int, allowed: float) -> str:
    lines = [
        f"{len(bad)} of {len(rows)} tensors on {world_size} ranks are not those of one process with the whole batch "
        f"(allowed is {allowed:g} of the largest of their kind):"
    ]
    lines += [
        f"{it.what} {it.name}: {it.error:.3g} apart, {it.relative:.3g} of {it.scale:.3g}" for it in bad[:MAX_LINES]
    ]
    if len(bad) > MAX_LINES:
        lines.append(f"and {len(bad) - MAX_LINES} more")
    if local:
        names = ", ".join(map(repr, local[:MAX_LINES]))
        remedy = "call syncbn.convert_syncbn_model(model), whose warning says what it leaves and why"
        lines.append(f"Layers that are not synchronised: {names}; {remedy}")
    in_first_step = {difference.what: difference in bad for difference in rows if difference.name == "of step 1"}
    if in_first_step["loss"] and not in_first_step.get("output", True):
        lines.append("The outputs agree and the losses do not: loss_fn must be the mean over samples")
    return "\n".join(lines)


def _check(batch: Batch, world_size: int, dtype: torch.dtype, steps: int) -> None:
    if isinstance(batch, Tensor) or not batch or not all(isinstance(part, Tensor) and part.ndim for part in batch):
        raise TypeError("batch must be a tuple of tensors of one dim or more: the model's input, then loss_fn's others")
    lengths = [len(tensor) for tensor in batch]
    if len(set(lengths)) > 1:
        raise ValueError(f"the tensors of a batch must have one length, got {lengths}")
    if not isinstance(world_size, Integral) or not 1 <= world_size <= lengths[0]:
        raise ValueError(f"world_size must be from 1 to the number of samples, {lengths[0]}, got {world_size!r}")
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, TOLERANCES))}, got {dtype}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
