"""What Inductor makes of the reference kernels, which compiled graphs have where there are no faster ones."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import syncbn
from syncbn import general, gradients
from syncbn.kernels import cpu, reference

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
