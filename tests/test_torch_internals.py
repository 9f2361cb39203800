"""Catches a later torch in which a private name that syncbn uses no longer means what syncbn needs."""

import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import GROUP_TIMEOUT
from jobs import run
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from syncbn import kernel_cache
from syncbn import torch_internals as internals

QUESTIONS: dict[str, Callable[[], object]] = {
    "plain": internals.is_eager,
    "functorch": internals.inside_functorch,
    "forward mode": lambda: internals.forward_mode_level() >= 0,
    "profiler": internals.profiler_enabled,
    "only profiled": lambda: internals.is_eager(SimpleNamespace(is_cuda=True)) and not internals.is_eager(),
    "jit": internals.is_jit_tracing,
    "backward": internals.inside_backward,
    "vmap": internals.inside_vmap,
    "vmap or forward mode": internals.inside_vmap_or_forward_mode,
    "dispatch mode": lambda: internals.current_dispatch_mode() is not None,
}

Function = Callable[[Tensor], Tensor]


def within(context: Any) -> Callable[[Function, Tensor], object]:
    def call(function: Function, x: Tensor) -> None:
        with context:
            function(x)

    return call


def checkpointed(**options: Any) -> Callable[[Function, Tensor], object]:
    """The last call is the recompute."""
    return lambda function, x: checkpoint(function, x.requires_grad_(), **options).backward()


def test_guards_tell_tensors_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they do not, in a later torch, no check is made. The answer holds for the whole process, so it must not
    depend on how torch runs in the first call."""
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with mode():
            assert internals.guards_work.__wrapped__()
    x = torch.ones(2, 3)
    for tensor_guards in (
        None,
        lambda *tensors, **dims: SimpleNamespace(check=lambda *others: True),
        Mock(side_effect=TypeError),
    ):
        monkeypatch.setattr(internals, "TensorGuards", tensor_guards)
        assert not internals.guards_work.__wrapped__()
    monkeypatch.setattr(internals, "guards_work", lambda: False)
    kernels = iter(("first", "second"))
    cache = kernel_cache.Cache(lambda *_: next(kernels))
    assert [cache.get("config", (x, None)) for _ in range(2)] == ["first", "second"]


selective = partial(create_selective_checkpoint_contexts, [])  # of which nothing is saved

# How a function is called, and which questions are then answered by yes.
WAYS: dict[str, tuple[Callable[[Function, Tensor], object], set[str]]] = {
    "profiler": (within(torch.profiler.profile(acc_events=True)), {"profiler", "only profiled"}),
    "dual level": (within(forward_ad.dual_level()), {"forward mode", "vmap or forward mode"}),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), {"functorch", "forward mode", "vmap or forward mode"}),
    "vmap of grad": (
        lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack((x, x))), {"functorch", "vmap", "vmap or forward mode"}
    ),
    "grad": (lambda f, x: torch.func.grad(f)(x), {"functorch"}),
    "torch.jit.trace": (lambda f, x: torch.jit.trace(f, x, check_trace=False), {"jit"}),
    "recompute": (checkpointed(use_reentrant=False), {"plain", "backward"}),
    "selective recompute": (checkpointed(use_reentrant=False, context_fn=selective), {"backward", "dispatch mode"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit")  # torch's own
@pytest.mark.parametrize("name", WAYS)
def test_how_torch_is_running(name: str) -> None:
    call, yes = WAYS[name]
    seen: list[set[str]] = []

    def function(x: Tensor) -> Tensor:
        seen.append({question for question, ask in QUESTIONS.items() if ask()})
        return x.sin().sum()

    call(function, torch.ones(2))
    assert seen[-1] == yes
    function(torch.ones(2))
    assert seen[-1] == {"plain"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit.script. is deprecated")  # torch's own
def test_in_graphs() -> None:
    """There the transforms alone are asked for, whatever is the outermost. A constant may be of what no graph holds."""
    x = torch.ones(2)
    asked = torch.compile(lambda x: x + internals.is_eager() + internals.is_jit_tracing(), backend="eager")
    assert torch.equal(asked(x), x)
    constant = internals.constant_in_graphs(lambda: len(inspect.stack()) and 42)

    def asks(x: Tensor) -> Tensor:
        return x.sin() if internals.inside_vmap_or_forward_mode() else x * constant()

    def transformed(x: Tensor) -> tuple[Tensor, ...]:
        return asks(x), torch.vmap(asks)(x), torch.func.jvp(asks, (x,), (x,))[0], torch.func.vjp(asks, x)[0]

    compiled = torch.compile(transformed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), (42 * x, x.sin(), x.sin(), 42 * x))


def test_names_of_tensors() -> None:
    x = torch.zeros(2)
    with torch.inference_mode():
        internals.increment_version((x, torch.zeros(2)))  # the second has no version
    assert x._version == 1
    assert [internals.is_zero_tensor(one) for one in (x, torch._efficientzerotensor(2))] == [False, True]
    several = x, x.expand(3, 2), torch.zeros(6)[::2], torch.zeros(1).expand(1)
    assert [*map(internals.overlaps_itself, several)] == [False, True, False, False]


def test_names_of_modules() -> None:
    layer = nn.Linear(2, 2)
    for name, runs in (("forward_pre", True), ("forward", True), ("full_backward", False)):
        with getattr(layer, f"register_{name}_hook")(lambda *_: None):  # removed at the end
            assert internals.has_forward_hooks(layer) is runs
        assert not internals.has_forward_hooks(layer)
    wrapped = torch.compile(layer, backend="eager")
    assert [internals.is_compiled(one) for one in (layer, wrapped)] == [False, True]
    layer.compile(backend="eager")
    assert internals.is_compiled(layer)
    assert "._replicate_for_data_parallel()" in inspect.getsource(torch.nn.parallel.replicate)  # SyncBatchNorm has one


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_names_of_groups(group_of_one: dist.ProcessGroup) -> None:
    """The operator of all_reduce leaves its argument. The class of stages is the one that torch builds; the schedules'
    tests have the other."""
    from torch.distributed import pipelining

    values = torch.arange(3.0)
    internals.all_reduce_operator(values, group_of_one).add_(1)
    assert torch.equal(values, torch.arange(3.0))
    internals.default_store().set("syncbn/test", "here")
    assert internals.default_store().get("syncbn/test") == b"here"
    second = dist.new_group([0], timeout=timedelta(seconds=33))
    assert [*internals.existing_groups()] == [group_of_one, second]
    assert internals.registered_name(second) == second.group_name
    assert internals.group_timeout(second) == timedelta(seconds=33)

    stage = pipelining.pipeline(nn.Linear(2, 2), (torch.ones(1, 2),)).build_stage(0, torch.device("cpu"), group_of_one)
    assert [internals.is_pipeline_stage(one) for one in (stage.submod, stage)] == [False, True]
    assert (stage.stage_index, stage.group) == (0, group_of_one)
    norm, sent_by = nn.BatchNorm1d(2), []
    norm.register_forward_pre_hook(lambda *_: sent_by.append(internals.broadcasting_ddp(norm.running_mean)))
    ddp = DistributedDataParallel(norm)
    assert ddp(torch.ones(2, 2)).equal(norm(torch.ones(2, 2)))
    assert sent_by == [ddp, None]


# None is what torch finds, with a GPU nccl too. On GPUs it is the current one, as of "nccl" and "cuda:nccl".
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None, "cuda:gloo"])
def test_device_of_a_group(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=GROUP_TIMEOUT)
    world = dist.group.WORLD
    for group in (world, dist.new_group([0], timeout=GROUP_TIMEOUT)):
        assert str(internals.group_device(group)) == ("cuda:2" if backend == "cuda:gloo" else "cpu")
        assert internals.group_timeout(group) == GROUP_TIMEOUT
    if backend == "cuda:gloo":
        world.bound_device_id = torch.device("cuda", 1)
        assert internals.group_device(world) == torch.device("cuda", 1)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_stream_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert internals.stream_handle(device) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert internals.stream_handle(device) is None


def test_no_default_argument_keeps_the_group() -> None:
    """torch.distributed.nn.functional does if it is imported while there is a group; syncbn does not import it."""
    code = """
import weakref, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import syncbn
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""
    run(sys.executable, "-c", code)  # which imports torch again


def test_a_graph_is_no_export() -> None:
    """Though Dynamo compiles both, and torch 2.11 takes every graph for an export."""

    def add_one_in_exports(x: Tensor) -> Tensor:
        return x + 1 if internals.is_exporting() else x

    class Model(nn.Module):
        forward = staticmethod(add_one_in_exports)

    x = torch.zeros(2)
    assert torch.compile(add_one_in_exports, backend="eager", fullgraph=True)(x).tolist() == [0, 0]
    assert torch.export.export(Model(), (x,), strict=True).module()(x).tolist() == [1, 1]


def test_a_record_of_a_trace_is_that_of_one_frame() -> None:
    """In another frame, and outside of any, the record is unknown."""

    def record_here(x: Tensor) -> Tensor:
        internals.note_call(False)
        return x + internals.note_call(True)

    x = torch.zeros(())
    assert torch.compile(record_here, backend="eager", fullgraph=True)(x) == 0
    internals.note_call(False)
    assert torch.compile(lambda x: x + internals.note_call(False), backend="eager", fullgraph=True)(x) == 1
    assert internals.note_call(True)
