"""What Inductor makes of the operators, and of the reference, which compiled graphs have where there are no faster
kernels."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import syncbn
from syncbn import general, gradients
from syncbn.kernels import cpu, operators, reference
from syncbn.kernels.interface import Kernels, Kind

pytestmark = [
    pytest.mark.skipif(bool(cpu.load()), reason="needs a C++ compiler"),
    # Inductor uses what torch itself deprecates (torch 2.13, November 2026).
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor"),
]


def maps(code: str) -> list[str]:
    """The loops over the whole tensor, of which each is a block of its own, that add nothing up."""
    blocks = re.findall(r"^    \{\n(.*?)^    \}", code, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if block.count("for(int64_t") >= 2 and "tmp_acc" not in block]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_maps_compute_nothing_in_float64(memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the channels' mathematics for each element would take several times as long as the memory."""
    torch._dynamo.reset()
    for road in (general, gradients):
        monkeypatch.setattr(road, "general_kernels", lambda kind, *tensors: reference.Kernels(kind))
    x = torch.randn(4, 16, 12, 12).to(memory_format=memory_format).requires_grad_()
    layer = torch.compile(syncbn.SyncBatchNorm2d(16), fullgraph=True)
    _, codes = run_and_get_code(lambda: layer(x).backward(torch.ones_like(x)))
    assert len(codes) == 2  # forward and backward
    for code in codes:
        assert "double" in code  # in the sums
        assert maps(code)
        for loop in maps(code):
            assert "double" not in loop, loop


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions generate other code")
@pytest.mark.parametrize(
    ("memory_format", "is_forced"),
    [(torch.contiguous_format, False), (torch.contiguous_format, True), (torch.channels_last, True)],
    ids=str,
)
def test_no_input_of_an_operator_is_copied(
    memory_format: torch.memory_format, is_forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by generated code nor by the operator, if Inductor makes convolutions channels last (`is_forced`), as it
    does on GPUs, or leaves all as it is. An operator without torch.Tag.flexible_layout had six copies of a layer's x
    and dy in a contiguous model."""
    copied, in_memory_as_x = [], operators._checked

    def checked(kind: Kind, x: Tensor, num_counts: int = 0, **tensors: Tensor | None) -> tuple[Kernels, list[Any]]:
        kernels, results = in_memory_as_x(kind, x, num_counts, **tensors)
        copied.extend(name for name, result in zip(tensors, results, strict=True) if result is not tensors[name])
        return kernels, results

    monkeypatch.setattr(operators, "_checked", checked)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, bias=False), syncbn.SyncBatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)
    model = nn.Sequential(*layers).to(memory_format=memory_format)
    x, eager = torch.randn(2, 3, 10, 10).to(memory_format=memory_format), copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    options = {"layout_optimization": is_forced, "force_layout_optimization": is_forced}
    # Both caches would give out graphs that an operator with other tags was in.
    with config.patch(fx_graph_cache=False, **options), functorch_config.patch(enable_autograd_cache=False):
        output, [forward] = run_and_get_code(compiled, x)
        _, [backward] = run_and_get_code(lambda: output.square().mean().backward())
    expected = eager(x)
    expected.square().mean().backward()
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    for actual, parameter in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, parameter.grad, rtol=1e-5, atol=1e-7)
    assert "syncbn.forward_sums" in forward
    assert "syncbn.backward_sums" in backward
    # A loop's name lists the operators for which it was generated.
    assert not re.findall(r"cpp_fused\w*(?:forward|backward)_(?:sums|outputs)", forward + backward)
    assert not copied
