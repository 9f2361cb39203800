"""Does what the parts of gpu_run.py start: each job prints lines of "RESULT " and json, at once.

    python scripts/gpu_jobs.py correctness float32 last all
    python scripts/gpu_jobs.py speed --dry-run              on a CPU, in Triton's interpreter (TRITON_INTERPRET=1)

Needs torch, and Triton where it calls the kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from syncbn.kernels import reference
from syncbn.layout import Layout

Shape = tuple[int, int, int, int]
REAL = [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 14, 14), (32, 2048, 7, 7), (8, 64, 512, 512)]
NARROW_TILES = (32, 144, 56, 56)  # in channels last: rows of 64 bytes, as wider ones would leave lanes idle
RAGGED = [
    (4, 3, 9, 7),  # 63 values: not a multiple of any vector
    (5, 2, 7, 7),  # 49: a run just longer than the shortest
    (9, 3, 31, 1),  # rows, of three channels with 31 columns each
    (300, 17, 1, 1),  # channels innermost
    (35, 130, 1, 1),  # two columns behind whole tiles
    (7, 3, 1, 1),
    (1, 1, 1, 1),
    (2, 5, 10, 100),
    (70, 40, 11, 3),  # several parts of a sum
    (3, 255, 5, 5),
    (2, 100, 28, 28),
    (33, 7, 13, 17),
    (1, 1000, 3, 3),
    (0, 3, 2, 2),  # an empty rank
    (4, 0, 5, 8),
]
TINY = [(4, 3, 9, 7)]
OF_WHOLE_TENSORS = {"forward_sums": 1, "forward_outputs": 2, "backward_sums": 2, "backward_outputs": 3}  # like x
EPS = 1e-5
FLUSHED_BYTES = 256 << 20  # more than a second cache has
ROUNDS = 12


def emit(**result: object) -> None:
    """A line for the runner."""
    print(f"RESULT {json.dumps(result)}", flush=True)


def layout_of(order: str) -> torch.memory_format:
    """For "first" or "last"."""
    return torch.channels_last if order == "last" else torch.contiguous_format


class Case:
    """Tensors of one step, with what the reference makes of them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, order: str, variant: str, device: torch.device) -> None:
        self.name = f"{'x'.join(map(str, shape))} {order} {str(dtype)[6:]} {variant}"
        generator = torch.Generator(device).manual_seed(0)

        def draw(mean: float) -> Tensor:
            numbers = torch.randn(shape, generator=generator, device=device) + mean
            return numbers.to(dtype).contiguous(memory_format=layout_of(order))

        with_all = variant == "all"
        self.x, self.dy, self.residual = draw(3.0), draw(0.0), draw(0.0) if with_all else None
        self.layout, self.relu, channels = Layout.of(self.x, 1), with_all, shape[1]
        parameter = torch.promote_types(dtype, torch.float32)
        self.weight = torch.linspace(0.5, 1.5, channels, dtype=parameter, device=device) if with_all else None
        self.bias = None if self.weight is None else self.weight - 1
        self.of_weight = None if self.weight is None else parameter
        self.sums = reference.forward_sums(self.x, self.layout)
        y, self.statistics = reference.forward_outputs(
            self.x, self.layout, self.sums, self.weight, self.bias, self.residual, EPS, self.relu
        )
        self.y = y if self.relu else None
        self.dy_sums, _, _ = reference.backward_sums(self.dy, self.x, self.y, self.layout, self.statistics, None, None)

    def calls(self, kernels: Any) -> dict[str, Callable[[], tuple[Tensor | None, ...]]]:
        """Each function by its name; all get what the reference found before, so that no error goes on to the next."""
        x, dy, y, layout, stats, weight = self.x, self.dy, self.y, self.layout, self.statistics, self.weight

        def moved() -> tuple[Tensor, Tensor]:
            means, variances = stats.new_zeros(x.shape[1]).float(), stats.new_ones(x.shape[1]).float()
            kernels.update_running_stats(means, variances, stats, 0.1)
            return means, variances

        return {
            "forward_sums": lambda: (kernels.forward_sums(x, layout),),
            "forward_outputs": lambda: kernels.forward_outputs(
                x, layout, self.sums, weight, self.bias, self.residual, EPS, self.relu
            ),
            "backward_sums": lambda: kernels.backward_sums(dy, x, y, layout, stats, self.of_weight, self.of_weight),
            "backward_outputs": lambda: kernels.backward_outputs(
                dy, x, y, layout, self.dy_sums, stats, weight, self.relu
            ),
            "update_running_stats": moved,
        }


def error_of(actual: Tensor, expected: Tensor, name: str, dtype: torch.dtype) -> float:
    """The largest error, in units of what is allowed.

    Sums: float32 may be added in float32 for a while, as values of 16 bits may. Else some roundings of the result.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    if actual.stride() != expected.stride():
        return float("inf")
    actual, expected, kind = actual.double(), expected.double(), actual.dtype
    float32 = torch.finfo(torch.float32).eps
    if name in ("forward_sums", "backward_sums"):
        relative = 1e-13 if dtype == torch.float64 else 2.0**-20
        allowed = relative * (expected.abs() + expected.abs().max() + 1)
    else:
        eps = 1e-11 if kind == torch.float64 else torch.finfo(kind).eps
        allowed = 2 * eps * expected.abs() + 32 * min(eps, float32) * max(1.0, expected.abs().max().item())
    error = ((actual - expected).abs() / allowed).max().item()
    return error if error == error else float("inf")


def compare(case: Case) -> None:
    """Each function beside the reference, twice: the same input gives the same bits."""
    from syncbn.kernels import gpu

    errors, ok = {}, True
    for (name, own), expected in zip(case.calls(gpu).items(), case.calls(reference).values(), strict=True):
        try:
            actual, again = own(), own()
            pairs = list(zip(actual, expected(), strict=True))
            errors[name] = max(
                (error_of(one, other, name, case.x.dtype) for one, other in pairs if other is not None), default=0.0
            )
            same = all(one is None or torch.equal(one, other) for one, other in zip(actual, again, strict=True))
            ok &= errors[name] <= 1 and same and all((one is None) == (other is None) for one, other in pairs)
        except Exception as error:  # a kernel that does not compile, say: the others are tried
            errors[name], ok = f"{type(error).__name__}: {error}"[:200], False
    emit(case=case.name, ok=ok, errors=errors)


def machine(arguments: argparse.Namespace) -> None:
    """Versions, the GPU, and which kernels serve it."""
    about: dict[str, object] = {"torch": torch.__version__, "kernels": syncbn.kernels.available()}
    try:
        import triton

        about["triton"] = triton.__version__
    except ImportError as error:
        about["triton"] = str(error)
    ok = True
    if arguments.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "GPU": properties.name,
            "GiB": properties.total_memory >> 30,
            "capability": f"{properties.major}.{properties.minor}",
        }
        about |= {"multiprocessors": properties.multi_processor_count, "nccl": torch.cuda.nccl.version()}
        ok = "cuda: Triton" in syncbn.kernels.available()
    emit(ok=ok, **about)


def correctness(arguments: argparse.Namespace) -> None:
    """One dtype, memory format and variant."""
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    dtype, order, variant = arguments.words
    for shape in TINY if arguments.dry_run else REAL[:-1] + RAGGED:
        compare(Case(shape, getattr(torch, dtype), order, variant, arguments.device))


def milliseconds(call: Callable[[], object], device: torch.device, flushed: Tensor) -> float:
    """Of one call, with nothing of it in the second cache; the host is ahead of the GPU by then."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flushed.zero_()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def speed(arguments: argparse.Namespace) -> None:
    """Each function that goes over whole tensors, with what it does for channels; torch's own, and a copy; in turn."""
    from syncbn.kernels import gpu

    device = arguments.device
    flushed = torch.empty(0 if arguments.dry_run else FLUSHED_BYTES, dtype=torch.uint8, device=device)
    for shape in TINY if arguments.dry_run else [*REAL, NARROW_TILES]:
        for order in ("first", "last"):
            for dtype in (torch.float32, torch.bfloat16):
                case = Case(shape, dtype, order, "plain", device)
                x, dy, target = case.x, case.dy, torch.empty_like(case.x)
                own = case.calls(gpu)
                calls: dict[str, tuple[Callable[[], object], int]] = {"copy": (lambda: target.copy_(x), 2)}  # noqa: B023
                calls |= {name: (own[name], count) for name, count in OF_WHOLE_TENSORS.items()}
                if device.type == "cuda":
                    calls |= calls_of_torch(x, dy)
                samples: dict[str, list[float]] = {name: [] for name in calls}
                for index in range(3 if arguments.dry_run else 2 + ROUNDS):
                    for name, (call, _) in calls.items():
                        taken = milliseconds(call, device, flushed)
                        if index >= 2:
                            samples[name].append(taken)
                times = {name: statistics.median(taken) for name, taken in samples.items()}
                for name, (_, count) in calls.items():
                    share = count / 2 * times["copy"] / times[name]
                    gigabytes = count * x.nbytes / times[name] / 1e6
                    emit(case=case.name, kernel=name, ms=times[name], GBs=gigabytes, **{"share of copy": share})


def calls_of_torch(x: Tensor, dy: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """The kernels of nn.SyncBatchNorm."""
    weight = torch.ones(x.shape[1], device=x.device)
    bias, count = torch.zeros_like(weight), torch.tensor([x.numel() // x.shape[1]], dtype=torch.int32, device=x.device)
    mean, invstd = torch.batch_norm_stats(x, EPS)
    sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
    backward = functools.partial(torch.batch_norm_backward_elemt, dy, x, mean, invstd, weight)
    return {
        "torch stats": (lambda: torch.batch_norm_stats(x, EPS), 1),
        "torch elemt": (lambda: torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS), 2),
        "torch backward_reduce": (
            lambda: torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True),
            2,
        ),
        "torch backward_elemt": (lambda: backward(sum_dy, sum_dy_xmu, count), 3),
    }


def kernels_once(arguments: argparse.Namespace) -> None:
    """For a tool that watches: the functions that go over whole tensors at real sizes, or all at 30 ragged ones."""
    from syncbn.kernels import gpu

    (sizes,) = arguments.words
    shapes, variant = (RAGGED, "all") if sizes == "ragged" else (REAL[:-1], "plain")
    for index, shape in enumerate(TINY if arguments.dry_run else shapes):
        for order in ("first", "last") if sizes == "real" else [("first", "last")[index % 2]]:
            for dtype in (torch.float32, torch.bfloat16):
                case = Case(shape, dtype, order, variant, arguments.device)
                for name, call in case.calls(gpu).items():
                    if sizes == "ragged" or name in OF_WHOLE_TENSORS:
                        call()
                        emit(launch=f"{name} {case.name}")
                if arguments.device.type == "cuda":
                    torch.cuda.synchronize()  # so that an error comes with the case


# Two ranks.


def rank(arguments: argparse.Namespace) -> None:
    """One of two, on the same GPU: see RANK_JOBS."""
    job, backend = arguments.words
    warnings.simplefilter("ignore", FutureWarning)
    # Longer than the 30 s after which a rank that waits says where all are.
    dist.init_process_group(backend, timeout=timedelta(seconds=20 if job == "layer" else 50))
    RANK_JOBS[job](arguments.device, dist.get_rank())
    dist.destroy_process_group()


def agree(what: str, actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """A result."""
    error = (actual.double().cpu() - expected.double().cpu()).abs().max().item()
    emit(what=what, rank=dist.get_rank(), error=error, ok=error <= tolerance)


def layer_job(device: torch.device, rank: int) -> None:
    """Uneven ranks are as one that has the whole batch."""
    torch.manual_seed(0)
    for shape, order in (((8, 16, 12, 12), "first"), ((8, 64, 9, 7), "last")):
        whole, whole_dy = (torch.randn(shape).mul(2).add(5).to(device) for _ in range(2))
        own = slice(0, 3) if rank == 0 else slice(3, 8)
        x = whole[own].contiguous(memory_format=layout_of(order)).requires_grad_()
        layer, alone = syncbn.SyncBatchNorm2d(shape[1]).to(device), nn.BatchNorm2d(shape[1]).to(device).double()
        y = layer(x)
        y.backward(whole_dy[own])
        whole = whole.double().requires_grad_()
        expected = alone(whole)
        expected.backward(whole_dy.double())
        agree("output", y.detach(), expected.detach()[own])
        agree("gradient", x.grad, whole.grad[own])
        agree("running_var", layer.running_var, alone.running_var)
        dist.all_reduce(layer.weight.grad)
        agree("grad_weight", layer.weight.grad, alone.weight.grad, 1e-2)


def train(counts: tuple[int, int], device: torch.device, rank: int) -> None:
    """So many batches on each rank, with DistributedDataParallel inside join, are as on one process."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
        return model.to(device)

    torch.manual_seed(1)
    batches = torch.randn(2, max(counts), 4, 3, 10, 10).to(device)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(make()))
    alone = make()
    own_optimizer, optimizer = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (ddp, alone))
    with syncbn.join(ddp):  # which divides by 2 throughout
        for step in range(counts[rank]):
            own_optimizer.zero_grad()
            ddp(batches[rank, step]).pow(3).sum().div(400).backward()
            own_optimizer.step()
    for step in range(max(counts)):
        batch = torch.cat([batches[one, step] for one in (0, 1) if step < counts[one]])
        optimizer.zero_grad()
        alone(batch).pow(3).sum().div(800).backward()
        optimizer.step()
    for name, expected in alone.state_dict().items():
        agree(name, ddp.module.state_dict()[name], expected, 1e-3)


def ddp_job(device: torch.device, rank: int) -> None:
    """As `train`, without join."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device)
    alone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device)
    alone.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(model))
    whole = torch.randn(8, 3, 10, 10).to(device)
    for _ in range(3):
        for one, batch, count in ((ddp, whole[4 * rank : 4 * rank + 4], 200), (alone, whole, 400)):
            one.zero_grad()
            one(batch).pow(3).sum().div(count).backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.01 * parameter.grad
    for name, expected in alone.state_dict().items():
        agree(name, ddp.module.state_dict()[name], expected, 1e-3)


def faulty_steps(device: torch.device, rank: int, fault: Callable[[], None]) -> None:
    """Rank 1 does something before the second layer of its third step."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    ddp = DistributedDataParallel(model.to(device))
    for step in range(4):
        if step == 2 and rank == 1:
            model[1].register_forward_hook(lambda *_: fault())
        loss = ddp(torch.randn(4, 3, device=device)).square().mean()
        loss.backward()
        emit(rank=rank, step=step, loss=loss.item())  # waits for the GPU


def killed_job(device: torch.device, rank: int) -> None:
    """Rank 0 is to say that the process of rank 1 has ended, and to end."""

    def kill() -> None:
        time.sleep(1.5)  # until its position is written
        os.kill(os.getpid(), signal.SIGKILL)

    faulty_steps(device, rank, kill)


def waits_job(device: torch.device, rank: int) -> None:
    """Rank 0 is to say after 30 s where both are; then both go on."""
    slept: list[bool] = []

    def sleep() -> None:
        if not slept:
            slept.append(True)
            time.sleep(34)

    faulty_steps(device, rank, sleep)


RANK_JOBS: dict[str, Callable[[torch.device, int], None]] = {
    "layer": layer_job,
    "ddp": ddp_job,
    "join": functools.partial(train, (4, 2)),
    "killed": killed_job,
    "waits": waits_job,
}


# ResNet-50.


class OfOneRank(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that synchronises over a group of one rank, too, which it would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.modules._functions import SyncBatchNorm

        self.num_batches_tracked.add_(1)
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum, dist.group.WORLD, 1
        )


def synchronise_one_rank() -> None:
    """Likewise for ours."""
    from syncbn.distributed import reduction
    from syncbn.distributed.side_reductions import GraphReduction
    from syncbn.roads import choice

    reduction.resolve = lambda spec: dist.group.WORLD
    choice.reduction_in_graph = lambda *of_call: GraphReduction(dist.group.WORLD)


def norm_of(name: str) -> Callable[[int], nn.Module]:
    """The layer for so many channels; those that synchronise get a group."""
    if name == "nn.BatchNorm2d":
        return nn.BatchNorm2d
    if name == "syncbn":
        return syncbn.SyncBatchNorm2d
    if name == "syncbn with a group":
        synchronise_one_rank()
        return syncbn.SyncBatchNorm2d
    return OfOneRank


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around which the input is added."""

    def __init__(self, norm: Callable[[int], nn.Module], inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), norm(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        shortcut = [] if same else [nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)]
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(norm: Callable[[int], nn.Module], blocks: tuple[int, ...]) -> nn.Module:
    """(N, 3, H, W) -> (N, 1000), with (3, 4, 6, 3) blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, number in enumerate(blocks):
        for block in range(number):
            layers.append(Bottleneck(norm, inputs, 64 << stage, stride=2 if block == 0 and stage else 1))
            inputs = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class TooLong(Exception):  # noqa: N818  # a time-out
    """The compiler's."""


class Steps:
    """Training steps of one model: bfloat16 under autocast, channels last, SGD."""

    def __init__(self, norm: str, arguments: argparse.Namespace) -> None:
        self.device, self.dry_run, self.norm = arguments.device, arguments.dry_run, norm
        torch.manual_seed(0)
        model = resnet50(norm_of(norm), (1,) if self.dry_run else (3, 4, 6, 3))
        self.model = model.to(self.device, memory_format=torch.channels_last)
        self.compiled = torch.compile(self.model, dynamic=False, backend="aot_eager" if self.dry_run else "inductor")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def batch(self, size: int) -> Tensor:
        """Images."""
        side = 32 if self.dry_run else 224
        return torch.randn(size, 3, side, side, device=self.device).to(memory_format=torch.channels_last)

    def step(self, model: nn.Module, images: Tensor) -> None:
        """One."""
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        self.optimizer.step()

    def captured(self, images: Tensor) -> Callable[[], None]:
        """The replay of a step, warmed up on a side stream as torch's notes on CUDA graphs say."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(self.model, images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(self.model, images)
        return graph.replay

    def measure(self, mode: str, size: int, call: Callable[[], object]) -> None:
        """The median wall clock of steps, in runs of five at whose end the host waits for the GPU."""
        rounds, samples = (1 if self.dry_run else 7), []
        for index in range(1 + rounds):
            start = time.perf_counter()
            for _ in range(1 if self.dry_run else 5):
                call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if index:
                samples.append((time.perf_counter() - start) / (1 if self.dry_run else 5) * 1e3)
        emit(norm=self.norm, mode=mode, batch=size, ms=statistics.median(samples), least=min(samples))


def raise_too_long(*_: object) -> None:
    raise TooLong


def resnet(arguments: argparse.Namespace) -> None:
    """Compiles, says "ready", waits until there is the file of its turn, measures, says "measured"."""
    (norm,) = arguments.words
    if arguments.device.type == "cuda":
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps, sizes = Steps(norm, arguments), (2,) if arguments.dry_run else (32, 8)
    batches = {size: steps.batch(size) for size in sizes}
    compiled = []
    signal.signal(signal.SIGALRM, raise_too_long)
    signal.alarm(arguments.compile_seconds)
    try:
        for size in sizes:
            start = time.perf_counter()
            steps.step(steps.compiled, batches[size])
            emit(norm=norm, batch=size, **{"seconds to compile": time.perf_counter() - start})
            compiled.append(size)
    except Exception as error:  # whatever the compiler makes of TooLong; the other modes are measured
        emit(norm=norm, mode="compiled", ok="TooLong" in f"{type(error)} {error}", error=str(error)[-300:])
    signal.alarm(0)
    emit(norm=norm, ready=True)
    while not arguments.turn.exists():
        time.sleep(0.05)
    for size, images in batches.items():
        steps.measure("eager", size, functools.partial(steps.step, steps.model, images))
        if size in compiled:
            steps.measure("compiled", size, functools.partial(steps.step, steps.compiled, images))
    for size, images in batches.items():  # last, as a capture that fails may leave the GPU unusable
        if arguments.device.type != "cuda":
            emit(norm=norm, mode="CUDA graph", skipped="needs a GPU")
            continue
        try:
            steps.measure("CUDA graph", size, steps.captured(images))
        except Exception as error:
            emit(norm=norm, mode="CUDA graph", batch=size, ok=False, error=f"{type(error).__name__}: {error}"[:300])
            break
    emit(norm=norm, measured=True)
    sys.stdout.flush()
    os._exit(0)  # a graph holds the group, which is not destroyed beneath it


JOBS = {
    "machine": machine,
    "correctness": correctness,
    "speed": speed,
    "kernels": kernels_once,
    "rank": rank,
    "resnet": resnet,
}


def main() -> None:
    """One job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--compile-seconds", type=int, default=60)
    parser.add_argument("--turn", type=Path, help="a file")
    arguments = parser.parse_args()
    arguments.device = torch.device("cpu" if arguments.dry_run else "cuda")
    torch.backends.cudnn.allow_tf32 = False
    JOBS[arguments.job](arguments)


if __name__ == "__main__":
    main()
