"""What Inductor makes of the reference kernels, which compiled graphs have where there are no faster ones."""

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import syncbn
from syncbn.kernels import cpu, reference
from syncbn.roads import watched

SHAPE = (4, 16, 12, 12)

pytestmark = [
    # Inductor uses what torch itself deprecates (torch 2.13, November 2026).
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    if cpu.load():
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()


def maps(code: str) -> list[str]:
    """The loops over the whole tensor, of which each is a block of its own, that add nothing up."""
    blocks = re.findall(r"^    \{\n(.*?)^    \}", code, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if block.count("for(int64_t") >= 2 and "tmp_acc" not in block]


def codes_of_a_step(x: Tensor) -> list[str]:
    """Forward and backward."""
    layer = torch.compile(syncbn.SyncBatchNorm2d(SHAPE[1]), fullgraph=True)
    _, codes = run_and_get_code(lambda: layer(x.requires_grad_()).backward(torch.ones_like(x)))
    assert len(codes) == 2
    return codes


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_maps_compute_nothing_in_float64(memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the channels' mathematics for each element would take several times as long as the memory."""
    monkeypatch.setattr(watched, "select_kernels", lambda *tensors: reference)
    for code in codes_of_a_step(torch.randn(SHAPE).to(memory_format=memory_format)):
        assert "double" in code  # in the sums
        assert maps(code)
        for loop in maps(code):
            assert "double" not in loop, loop


def test_this_check_can_fail() -> None:
    @torch.compile(fullgraph=True)
    def normalize(x: Tensor, sums: Tensor) -> Tensor:
        mean = sums / 576
        return (x - mean.view(1, -1, 1, 1)).float()

    _, (code,) = run_and_get_code(normalize, torch.randn(SHAPE), torch.randn(SHAPE[1], dtype=torch.float64))
    assert any("double" in loop for loop in maps(code))
