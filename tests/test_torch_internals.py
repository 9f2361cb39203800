"""Tests that the private names of torch in torch_internals.py mean in this torch what syncbn needs."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import GROUP_TIMEOUT
from equal_to_torch import escaped
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from syncbn import kernel_cache
from syncbn import torch_internals as internals

ignore_jit_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit")
Function = Callable[[Tensor], Tensor]
QUESTIONS: dict[str, Callable[[], object]] = {
    "eager": internals.is_eager,
    "functorch": internals.inside_functorch,
    "forward mode": lambda: internals.forward_mode_level() >= 0,
    "profiler": internals.profiler_enabled,
    "eager on a GPU only": lambda: internals.is_eager(SimpleNamespace(is_cuda=True)) and not internals.is_eager(),
    "jit": internals.is_jit_tracing,
    "backward": internals.inside_backward,
    "vmap": internals.inside_vmap,
    "vmap or forward mode": internals.inside_vmap_or_forward_mode,
    "dispatch mode": lambda: internals.current_dispatch_mode() is not None,
}


def call_within(context: Any, function: Function, x: Tensor) -> None:
    with context:
        function(x)


def recompute(function: Function, x: Tensor, **options: Any) -> None:
    """Call the function last in the recompute of activation checkpointing."""
    checkpoint(function, x.requires_grad_(), use_reentrant=False, **options).backward()


SAVE_NOTHING = partial(create_selective_checkpoint_contexts, [])
MODES: dict[str, tuple[Callable[[Function, Tensor], object], set[str]]] = {  # mode -> caller, questions with answer yes
    "profiler": (partial(call_within, torch.profiler.profile(acc_events=True)), {"profiler", "eager on a GPU only"}),
    "dual level": (partial(call_within, forward_ad.dual_level()), {"forward mode", "vmap or forward mode"}),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), {"functorch", "forward mode", "vmap or forward mode"}),
    "vmap of grad": (
        lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack((x, x))), {"functorch", "vmap", "vmap or forward mode"}
    ),
    "grad": (lambda f, x: torch.func.grad(f)(x), {"functorch"}),
    "torch.jit.trace": (lambda f, x: torch.jit.trace(f, x, check_trace=False), {"jit"}),
    "recompute": (recompute, {"eager", "backward"}),
    "selective recompute": (partial(recompute, context_fn=SAVE_NOTHING), {"backward", "dispatch mode"}),
}  # fmt: skip


@ignore_jit_warnings
@pytest.mark.parametrize("name", MODES)
def test_each_mode_of_torch_is_detected_until_it_ends(name: str) -> None:
    call, expected = MODES[name]
    answers: list[set[str]] = []

    def function(x: Tensor) -> Tensor:
        answers.append({question for question, ask in QUESTIONS.items() if ask()})
        return x.sin().sum()

    call(function, torch.ones(2))
    assert answers[-1] == expected
    function(torch.ones(2))
    assert answers[-1] == {"eager"}


def hooked(kind: str) -> nn.Module:
    layer = nn.Linear(2, 2)
    getattr(layer, f"register_{kind}_hook")(lambda *_: None)
    return layer


def test_predicates_of_tensors_and_modules() -> None:
    x, layer, unhooked, compiled_in_place = torch.zeros(2), *(nn.Linear(2, 2) for _ in range(3))
    unhooked.register_forward_hook(lambda *_: None).remove()
    compiled_in_place.compile(backend="eager")
    examples: dict[Callable[[Any], bool], tuple[list[Any], list[Any]]] = {  # arguments that give False; True
        internals.is_zero_tensor: ([x], [torch._efficientzerotensor(2)]),
        internals.is_wrapped: ([x], [escaped(x)]),
        internals.overlaps_itself: ([x, torch.zeros(6)[::2], torch.zeros(1).expand(1)], [x.expand(3, 2)]),
        internals.has_forward_hooks: ([unhooked, hooked("full_backward")], [hooked("forward"), hooked("forward_pre")]),
        internals.is_compiled: ([layer], [torch.compile(layer, backend="eager"), compiled_in_place]),
    }
    for predicate, (no, yes) in examples.items():
        assert [*map(predicate, no + yes)] == [False] * len(no) + [True] * len(yes), predicate


def test_names_of_autograd_and_modules() -> None:
    x = torch.zeros(2)
    with torch.inference_mode():
        internals.increment_version((x, torch.zeros(2)))  # the second tensor has no version
    assert x._version == 1
    assert "._replicate_for_data_parallel()" in inspect.getsource(torch.nn.parallel.replicate)  # SyncBatchNorm has one


def test_guards_distinguish_tensors_in_any_mode() -> None:
    """The answer is cached for the process, so it must not depend on the mode of the first call."""
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        with mode():
            assert internals.guards_work.__wrapped__()


@pytest.mark.parametrize("tensor_guards", [None, lambda *_, **__: SimpleNamespace(check=lambda *_: True), lambda: None])
def test_without_working_guards_no_kernel_is_cached(tensor_guards: Any) -> None:
    """A later torch may lack TensorGuards, accept any tensors, or have another signature."""
    kernels = iter(("first", "second"))
    cache = kernel_cache.Cache(lambda *_: next(kernels))
    with mock.patch.multiple(internals, TensorGuards=tensor_guards, guards_work=internals.guards_work.__wrapped__):
        assert [cache.get("config", (torch.ones(2, 3), None)) for _ in range(2)] == ["first", "second"]


# Compiled graphs.


def test_graphs_ask_for_transforms() -> None:
    """A constant may come from code that Dynamo cannot trace."""
    constant = internals.constant_in_graphs(lambda: len(inspect.stack()) and 42)

    def ask(x: Tensor) -> Tensor:
        return x.sin() if internals.inside_vmap_or_forward_mode() else x * constant()

    def transformed(x: Tensor) -> tuple[Tensor, ...]:
        return ask(x), torch.vmap(ask)(x), torch.func.jvp(ask, (x,), (x,))[0], torch.func.vjp(ask, x)[0]

    compiled, x = torch.compile(transformed, backend="eager", fullgraph=True), torch.ones(2)
    torch.testing.assert_close(compiled(x), (42 * x, x.sin(), x.sin(), 42 * x))


def test_a_record_of_a_trace_belongs_to_its_frame() -> None:
    """In another frame, and outside of any frame, the record is unknown."""

    def record_here(x: Tensor) -> Tensor:
        internals.note_call(False)
        return x + internals.note_call(True)

    x = torch.zeros(())
    assert torch.compile(record_here, backend="eager", fullgraph=True)(x) == 0
    internals.note_call(False)
    assert torch.compile(lambda x: x + internals.note_call(False), backend="eager", fullgraph=True)(x) == 1
    assert internals.note_call(True)


# Process groups.


def test_stores_names_and_timeouts_of_groups(group_of_one: dist.ProcessGroup) -> None:
    values = torch.arange(3.0)
    internals.all_reduce_operator(values, group_of_one).add_(1)
    assert torch.equal(values, torch.arange(3.0)), "all_reduce_operator has changed its argument"
    internals.default_store().set("syncbn/test", "here")
    assert internals.default_store().get("syncbn/test") == b"here"
    second = dist.new_group([0], timeout=timedelta(seconds=33))
    assert [*internals.existing_groups()] == [group_of_one, second]
    assert internals.registered_name(second) == second.group_name
    assert internals.group_timeout(second) == timedelta(seconds=33)


def test_the_ddp_that_broadcasts_a_buffer_is_found_in_its_forward(group_of_one: dist.ProcessGroup) -> None:
    norm, found = nn.BatchNorm1d(2), []
    norm.register_forward_pre_hook(lambda *_: found.append(internals.broadcasting_ddp(norm.running_mean)))
    ddp = DistributedDataParallel(norm)
    assert ddp(torch.ones(2, 2)).equal(norm(torch.ones(2, 2)))
    assert found == [ddp, None]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_stage_that_torch_builds_is_a_pipeline_stage(group_of_one: dist.ProcessGroup) -> None:
    """test_pipeline_schedules.py has the other class of stages."""
    from torch.distributed import pipelining  # here: syncbn searches for stages only once it is imported

    stage = pipelining.pipeline(nn.Linear(2, 2), (torch.ones(1, 2),)).build_stage(0, torch.device("cpu"), group_of_one)
    assert [internals.is_pipeline_stage(candidate) for candidate in (stage.submod, stage)] == [False, True]
    assert (stage.stage_index, stage.group) == (0, group_of_one)


# With None torch chooses the backends. "cuda:gloo" stands for "nccl" and "cuda:nccl", which need a GPU.
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None, "cuda:gloo"])
def test_device_of_a_group(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a group with gloo on the CPU uses all_to_all."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=GROUP_TIMEOUT)
    world, is_gpu = dist.group.WORLD, backend == "cuda:gloo"
    for group in (world, dist.new_group([0], timeout=GROUP_TIMEOUT)):
        assert str(internals.group_device(group)) == ("cuda:2" if is_gpu else "cpu")
        assert internals.group_timeout(group) == GROUP_TIMEOUT
        assert internals.all_to_all_size(group) == (not is_gpu)
    if is_gpu:
        world.bound_device_id = torch.device("cuda", 1)
        assert internals.group_device(world) == torch.device("cuda", 1)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_has_a_handle_unless_it_captures_a_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert internals.stream_handle(device) == torch.cuda.current_stream().cuda_stream
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert internals.stream_handle(device) is None
