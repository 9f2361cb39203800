"""Tests that private names of torch mean in this torch what syncbn/torch_internals.py expects.

If another name gets a new meaning, results or errors of layers change, and their tests fail.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._debug_mode import DebugMode

from syncbn import kernel_cache
from syncbn import torch_internals as internals

PREDICATES = (
    "is_eager", "profiler_enabled", "inside_backward", "inside_functorch", "inside_vmap_or_forward_mode",
    "is_jit_tracing", "current_dispatch_mode",
)  # fmt: skip


def active() -> set[str]:
    return {name for name in PREDICATES if getattr(internals, name)()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit")  # TorchScript warns.
def test_each_mode_of_torch_is_detected_until_it_ends() -> None:
    x, seen = torch.ones(2), list[set[str]]()

    def function(x: Tensor) -> Tensor:
        seen.append(active())
        return x.sin().sum()

    with torch.profiler.profile(acc_events=True):
        assert active() == {"profiler_enabled"}
        # A profiler records kernels of GPUs even if they are not launched through torch's dispatcher.
        assert internals.is_eager(SimpleNamespace(is_cuda=True))
    with forward_ad.dual_level():
        assert active() == {"inside_vmap_or_forward_mode"}
    with DebugMode():
        assert active() == {"current_dispatch_mode"}
    y = x.clone().requires_grad_().sin()
    y.register_hook(lambda _: seen.append(active()))
    y.sum().backward()
    assert seen.pop() == {"is_eager", "inside_backward"}
    torch.func.grad(function)(x)
    torch.func.jvp(function, (x,), (x,))
    torch.vmap(torch.func.grad(function))(x[None])
    torch.jit.trace(function, x, check_trace=False)
    vmap_or_forward_mode = {"inside_functorch", "inside_vmap_or_forward_mode"}
    assert seen == [{"inside_functorch"}, vmap_or_forward_mode, vmap_or_forward_mode, {"is_jit_tracing"}]
    assert active() == {"is_eager"}


def test_data_parallel_makes_replicas_by_the_method_that_syncbn_overrides() -> None:
    assert "._replicate_for_data_parallel()" in inspect.getsource(torch.nn.parallel.replicate)


def test_a_trace_does_not_read_the_record_of_another_trace() -> None:
    """`note_call(False)` returns True if this trace has recorded nothing: after a graph break another trace may have
    called batch norm, so syncbn must not warn."""
    for function in (lambda x: x + internals.note_call(False), lambda x: x + internals.note_call(False)):
        assert torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(())) == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode, partial(torch.autocast, "cpu")])
def test_guards_distinguish_tensors_in_any_mode(mode: Callable[[], Any]) -> None:
    """`guards_work` is cached for the process, so its result must not depend on the mode of the first call."""
    with mode():
        assert internals.guards_work.__wrapped__()


def accepting_guards(*tensors: Tensor, **options: None) -> SimpleNamespace:
    return SimpleNamespace(check=lambda *tensors: True)


@pytest.mark.parametrize("tensor_guards", [None, accepting_guards, object])
def test_without_working_guards_no_kernel_is_cached(tensor_guards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later torch may have no TensorGuards, guards that accept any tensors, or guards with other arguments."""
    monkeypatch.setattr(internals, "TensorGuards", tensor_guards)
    monkeypatch.setattr(internals, "guards_work", internals.guards_work.__wrapped__)
    cache, tensors = kernel_cache.Cache(lambda *_: object()), (torch.ones(2, 3), None)
    assert cache.get("config", tensors) is not cache.get("config", tensors)


# With None torch chooses the backends. "cuda:gloo" takes the place of "nccl" and "cuda:nccl", which need a GPU.
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", None, "cuda:gloo"])
def test_device_and_timeout_of_a_group(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a group with gloo on the CPU uses all_to_all_single."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    timeout = timedelta(seconds=77)  # not a default of torch
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world, is_gpu = dist.group.WORLD, backend == "cuda:gloo"
    for group in (world, dist.new_group([0], timeout=timeout)):
        assert str(internals.group_device(group)) == ("cuda:2" if is_gpu else "cpu")
        assert internals.group_timeout(group) == timeout
        assert internals.all_to_all_size(group) == (0 if is_gpu else 1)
    if is_gpu:
        world.bound_device_id = torch.device("cuda", 1)
        assert internals.group_device(world) == torch.device("cuda", 1)
    dist.destroy_process_group()
