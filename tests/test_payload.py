"""Tests that Python, C++ and Triton read and write the same positions of a payload.

test_kernels.py would notice a wrong position too, but not where it is.
"""

import re
from pathlib import Path

import pytest
import torch

import syncbn
from syncbn import payload

PACKAGE = Path(syncbn.__file__).parent
POSITIONS = ["NUM_VALUES", "COUNT", "IS_SIGNED", "SIGNATURE", "SQUARE"]


def test_the_positions_in_python() -> None:
    assert [getattr(payload, name) for name in POSITIONS] == [*range(payload.TRAILER_ELEMENTS)]
    sums, call_id = torch.arange(6.0, dtype=torch.float64), torch.tensor([200.0], dtype=torch.float64)
    unsigned = payload.from_sums(sums, 20)
    assert unsigned.tolist() == [*range(6), 20, 0, 0, 0, 0]
    assert (len(unsigned), payload.num_channels(unsigned)) == (payload.num_elements(3), 3)
    signed = payload.sign(unsigned, 5, 7)
    assert signed.tolist() == [*range(6), 20, 7, 1, 5, 25]
    assert torch.equal(payload.sums(signed), sums)
    assert payload.sums_and_num_values(signed).tolist() == [*range(6), 20]
    masked = payload.with_num_values(signed, torch.tensor(8))
    assert payload.num_values(masked) == 8
    assert masked[payload.TRAILER].tolist() == [8, 7, 1, 5, 25]
    assert payload.sign(unsigned, 5, call_id=call_id)[payload.TRAILER].tolist() == [20, 0, 1, 205, 205**2]
    assert payload.sign(unsigned, payload.UNSIGNED, 7, call_id) is unsigned


def test_the_positions_in_cpp() -> None:
    code = (PACKAGE / "kernels" / "cpu.cpp").read_text()
    assert re.search(r"enum Trailer : int64_t \{ (.*) \};", code)[1].split(", ") == POSITIONS
    for name in ("cpu.cpp", "cpu_channels.h", "cpu_loops.h"):  # trailer[1] and total[2 * channels] are not names
        source = (PACKAGE / "kernels" / name).read_text()
        assert not re.search(r"trailer\[\d|total\[2 \* channels\]", source)


def test_the_positions_in_triton() -> None:
    channels = pytest.importorskip("syncbn.kernels.gpu_channels")
    for name in (*POSITIONS, "NUM_IDS"):
        assert getattr(channels, name).value == getattr(payload, name)
    assert payload.NUM_IDS & (payload.NUM_IDS - 1) == 0, "gpu_channels.py divides by a mask"
    source = (PACKAGE / "kernels" / "gpu_channels.py").read_text()
    assert not re.search(r"trailer \+ \d|tl\.(load|store)\(trailer[,)]", source)


def test_no_other_module_knows_positions() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.name != "payload.py":
            assert "TRAILER_ELEMENTS" not in file.read_text(), file
