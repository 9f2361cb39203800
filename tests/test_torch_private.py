"""Each private name of torch that syncbn uses means what syncbn needs: fails where a later torch changes it."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import syncbn
from syncbn import torch_private, torch_state

TIMEOUT = timedelta(seconds=77)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A default group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_runs_plainly() -> None:
    """Not where the thread has the keys of a mode, or a transform, nor under a profiler; more in test_dispatcher.py."""
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_state.runs_plainly())
        return x + 1

    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(2))
    with FakeTensorMode():
        look(torch.ones(2))
    for profiler in (torch.profiler.profile(acc_events=True), torch.autograd.profiler.profile(acc_events=True)):
        with profiler:
            look(torch.ones(2))
    assert seen == [True, *[False] * 6]
    seen.clear()
    with torch.inference_mode(), torch.autocast("cpu"), torch.autograd.graph.saved_tensors_hooks(look, look):
        look(torch.ones(2))
    assert seen == [True]


def test_runs_plainly_is_false_in_graphs() -> None:
    assert not torch.compile(lambda x: x + torch_state.runs_plainly(), backend="eager")(torch.zeros(2)).any()


def test_increment_version() -> None:
    """Inference tensors, which have no version, are passed over."""
    x = torch.zeros(2)
    before = x._version
    with torch.inference_mode():
        torch_private.increment_version((x, torch.zeros(2)))
    assert x._version == before + 1


def test_is_zero_tensor() -> None:
    assert torch_private.is_zero_tensor(torch._efficientzerotensor(2))
    assert not torch_private.is_zero_tensor(torch.zeros(2))


def test_direct_apply() -> None:
    """As Function.apply, also of what is None and of what is no tensor."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: None, factor: float) -> torch.Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return dy * ctx.factor, None, None

    x = torch.ones(2, requires_grad=True)
    y = torch_private.direct_apply(Scale)(x, None, 3.0)
    assert torch.equal(y, Scale.apply(x, None, 3.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_current_backward() -> None:
    """Not -1 in a recompute of either kind of checkpointing."""
    for use_reentrant in (False, True):
        seen = []

        def forward(x: torch.Tensor, seen: list[bool] = seen) -> torch.Tensor:
            seen.append(torch_state.current_backward() == -1)
            return x.sin()

        x = torch.ones(2, requires_grad=True)
        checkpoint(forward, x, use_reentrant=use_reentrant).sum().backward()
        assert seen == [True, False]


def test_inside_functorch() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_state.inside_functorch())
        return x.sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    assert seen == [False, True]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
def test_forward_mode_level() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_state.forward_mode_level())
        return x.sin()

    x = torch.ones(2)
    function(x)
    torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        function(x)
    assert seen == [-1, 0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit.script. is deprecated")  # torch's own
def test_inside_vmap_and_forward_mode() -> None:
    """In graphs too, whatever transform is the outermost."""
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_private.inside_vmap(), torch_private.inside_vmap_or_forward_mode()))
        return x.sin().sum()

    x = torch.ones(2)
    function(x)
    torch.func.grad(function)(x)
    torch.vmap(torch.func.grad(function))(torch.ones(3, 2))
    torch.func.grad(lambda x: torch.vmap(function)(x).sum())(torch.ones(3, 2))
    torch.func.jvp(function, (x,), (x,))
    torch.func.hessian(function)(x)
    assert seen == [(False, False), (False, False), (True, True), (True, True), (False, True), (True, True)]

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch_private.inside_vmap_or_forward_mode() else x

    def transformed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return asks(x), torch.vmap(asks)(x), torch.func.jvp(asks, (x,), (x,))[0], torch.func.vjp(asks, x)[0]

    compiled = torch.compile(transformed, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), (x, x.sin(), x.sin(), x))


def test_batched_gradients_and_their_stack() -> None:
    """What is done to the stack is done to each gradient, and has a graph."""
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
            seen.append((torch_private.is_batched_gradient(dy), tuple(dy.shape)))

            def double(stack: torch.Tensor) -> torch.Tensor:
                seen.append((torch_private.is_batched_gradient(stack), tuple(stack.shape)))
                return 2 * stack

            return torch_private.apply_to_stack(double, dy)

    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(Doubled.apply(x.square()), x, torch.eye(2), is_grads_batched=True, create_graph=True)
    assert seen == [(True, (2,)), (False, (2, 2))]
    assert torch.equal(first, 4 * torch.eye(2))
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], torch.tensor([4.0, 4.0]))
    torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert seen[2:] == [(False, (2,)), (False, (2,))]


def test_innermost() -> None:
    x, found = torch.ones(2, 3), []
    assert torch_private.innermost(x) is x
    torch.vmap(torch.func.grad(lambda row: found.append(torch_private.innermost(row)) or row.sum()))(x)
    assert found[0] is x


def test_ragged_dim() -> None:
    offsets = torch.tensor([0, 2, 5])
    for dim, shape in ((1, (5, 4)), (2, (4, 5))):
        nested = torch.nested.nested_tensor_from_jagged(torch.randn(shape), offsets, jagged_dim=dim)
        assert torch_private.ragged_dim(nested) == dim
        assert [size for size in nested.shape if isinstance(size, int)] == [2, 4]


def test_profiler_enabled() -> None:
    assert not torch_state.profiler_enabled()
    with torch.profiler.profile(acc_events=True):
        assert torch_state.profiler_enabled()
    assert not torch_state.profiler_enabled()


def test_current_dispatch_mode_and_selective_checkpointing() -> None:
    assert torch_private.current_dispatch_mode() is None
    assert not torch_private.inside_selective_checkpoint()
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_private.current_dispatch_mode() is not None, torch_private.inside_selective_checkpoint()))
        return x.sin()

    def contexts() -> tuple[object, object]:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    x = torch.ones(2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen == [(True, True), (True, True)]


def test_all_reduce_operator(group: dist.ProcessGroup) -> None:
    """It returns the total, and leaves its argument."""
    values = torch.arange(3.0)
    total = torch_private.all_reduce_operator(values, group)
    assert torch.equal(total, values)
    assert total.data_ptr() != values.data_ptr()


def test_constant_in_graphs() -> None:
    """What it marks may do what no graph can hold."""

    @torch_state.constant_in_graphs
    def answer() -> int:
        return len(sys.modules) > 0 and 42

    def unmarked() -> int:
        return len(inspect.stack()) and 42

    marked = torch_state.constant_in_graphs(lambda: len(inspect.stack()) and 42)
    x = torch.ones(2)
    for function in (answer, marked):
        compiled = torch.compile(lambda x, function=function: x * function(), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), 42 * x)
    with pytest.raises(Exception, match=r"(?i)dynamo|unsupported|graph"):
        torch.compile(lambda x: x * unmarked(), backend="eager", fullgraph=True)(x)


@pytest.mark.skipif(not hasattr(torch.compiler.config, "compile_on_one_rank"), reason="torch 2.15 is the first")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
def test_group_in_graph(group: dist.ProcessGroup) -> None:
    """Without it AOTAutograd copies the graph for backward, and no group can be copied: where this fails to raise, the
    operator is no longer needed."""

    class AllReduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, in_graph: bool) -> torch.Tensor:
            ctx.in_graph = in_graph
            return x * 2

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            dy = dy * 2
            dist.all_reduce(dy, group=torch_private.group_in_graph(group) if ctx.in_graph else group)
            return dy, None

    def gradient(in_graph: bool) -> torch.Tensor:
        torch._dynamo.reset()
        x = torch.ones(3, requires_grad=True)
        with torch.compiler.config.patch(compile_on_one_rank=True):
            torch.compile(AllReduce.apply, backend="aot_eager", fullgraph=True)(x, in_graph).sum().backward()
        return x.grad

    assert torch.equal(gradient(in_graph=True), torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="ProcessGroup"):
        gradient(in_graph=False)


def test_has_forward_hooks() -> None:
    """Not those of a backward, which do nothing with what torch.fx passes."""
    for name, expected in (("forward_pre", True), ("forward", True), ("full_backward", False)):
        layer = nn.Linear(2, 2)
        assert not torch_private.has_forward_hooks(layer)
        handle = getattr(layer, f"register_{name}_hook")(lambda *_: None)
        assert torch_private.has_forward_hooks(layer) is expected
        handle.remove()
        assert not torch_private.has_forward_hooks(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_is_jit_tracing() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_state.is_jit_tracing())
        return x + 1

    function(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen == [False, True]
    compiled = torch.compile(lambda x: x + torch_state.is_jit_tracing(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))


def test_is_compiled_and_without_compile() -> None:
    layer = nn.Linear(2, 2)
    assert not torch_private.is_compiled(layer)
    assert torch_private.without_compile(layer) is layer
    wrapped = torch.compile(layer, backend="eager")
    assert torch_private.is_compiled(wrapped)
    assert torch_private.without_compile(wrapped) is layer
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert torch_private.is_compiled(in_place)


def test_replicas() -> None:
    """nn.DataParallel makes its copies of a module by this method; those of a layer synchronise nothing."""
    assert "._replicate_for_data_parallel()" in inspect.getsource(torch.nn.parallel.replicate)
    layer = syncbn.SyncBatchNorm(3)
    assert layer._replicate_for_data_parallel()._train_over_ranks is not layer._train_over_ranks


def test_join_asks_how_many_have_not_joined(group: dist.ProcessGroup) -> None:
    """Before each iteration that a joined rank shadows, and at the end; else syncbn.join would wait for ever."""
    asked = []

    class Counted(torch_private.JoinAfter):
        def before_iteration(self) -> None:
            asked.append(True)

    with Counted([DistributedDataParallel(nn.Linear(2, 2))]):
        pass
    assert asked
    assert Counted._get_num_nonjoined_procs is not Join._get_num_nonjoined_procs
    assert "_get_num_nonjoined_procs()" in inspect.getsource(Join.__exit__)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_is_pipeline_stage(group: dist.ProcessGroup) -> None:
    """A stage of either class; the modules in it are called by its methods."""
    assert not torch_private.is_pipeline_stage(nn.Linear(2, 2))
    from torch.distributed import pipelining

    seen = []
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    pipe = pipelining.pipeline(nn.Linear(2, 2), (torch.ones(1, 2),))
    for one in (stage, pipe.build_stage(0, torch.device("cpu"), group)):
        assert torch_private.is_pipeline_stage(one)
        assert one.stage_index == 0
        one.submod.register_forward_hook(lambda *_: seen.append([frame.frame.f_locals for frame in inspect.stack()]))
        one.forward_maybe_with_nosync(torch.ones(1, 2))
        assert any(of_frame.get("self") is one for of_frame in seen.pop())
    assert stage.group is None
    assert one.group is group


def test_default_store_existing_groups_and_timeout(group: dist.ProcessGroup) -> None:
    torch_private.default_store().set("syncbn/test", "here")
    assert torch_private.default_store().get("syncbn/test") == b"here"
    second = dist.new_group([0], timeout=timedelta(seconds=33))
    assert [*torch_private.existing_groups()] == [group, second]
    assert torch_private.timeout_of(group) == TIMEOUT
    assert torch_private.timeout_of(second) == timedelta(seconds=33)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None])
def test_device_of_a_group_with_a_cpu(backend: str | None) -> None:
    """Where it is not given ("undefined") it has what torch finds: with a GPU nccl, too."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    for group in (dist.group.WORLD, dist.new_group([0], timeout=TIMEOUT)):
        assert torch_private.device_of(group) == torch.device("cpu")
        assert torch_private.timeout_of(group) == TIMEOUT
    dist.destroy_process_group()


def test_device_of_a_group_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of "nccl" and "cuda:nccl". One that is bound to a GPU may have another than the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert torch_private.device_of(group) == torch.device("cuda", 2)
    assert torch_private.timeout_of(group) == TIMEOUT
    group.bound_device_id = torch.device("cuda", 1)
    assert torch_private.device_of(group) == torch.device("cuda", 1)
    dist.destroy_process_group()


def test_waits_for_others(group: dist.ProcessGroup) -> None:
    """The frames that call into torch's C++ and wait there, and none of a forward or of this test."""
    calling = set()

    def watch(frame: FrameType, event: str, function: object) -> None:
        if event == "c_call":
            calling.add((getattr(function, "__name__", ""), torch_private.waits_for_others(frame)))

    x = torch.ones(2, 3)
    sys.setprofile(watch)
    try:
        dist.barrier()
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        ddp(x).sum().backward()
        time.sleep(0)
    finally:
        sys.setprofile(None)
    waiting = {"wait", "_verify_params_across_processes", "_broadcast_coalesced", "run_backward"}
    assert {name for name, waits in calling if waits} >= waiting
    assert {name for name, waits in calling if not waits} >= {"linear", "batch_norm", "sleep"}


@pytest.mark.parametrize("group_first", [False, True])
def test_no_default_argument_keeps_the_group(group_first: bool) -> None:
    """torch.distributed.nn.functional does if it is first imported beside a group: syncbn imports it only before."""
    make = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    lines = (
        [make, "import syncbn"] if group_first else ["import syncbn", make, "import torch.distributed.nn.functional"]
    )
    code = "\n".join(
        [
            "import weakref, torch, torch.distributed as dist",
            *lines,
            "group = weakref.ref(dist.group.WORLD)",
            "dist.destroy_process_group()",
            "assert group() is None",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)
