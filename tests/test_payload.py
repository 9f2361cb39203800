"""Tests that Python and C++ write and read a payload at the same positions. Triton's kernels import the positions."""

import re
from pathlib import Path

import torch

import syncbn
from syncbn import payload

KERNELS = Path(syncbn.__file__).parent / "kernels"
POSITIONS = ["NUM_VALUES", "COUNT", "IS_SIGNED", "SIGNATURE", "SQUARE"]


def test_functions_write_and_read_the_positions_of_the_table() -> None:
    sums = torch.arange(6.0, dtype=torch.float64)
    unsigned = payload.from_sums(sums, 20)
    signed = payload.sign(unsigned, 5, count=7)
    assert unsigned.tolist() == [*range(6), 20, 0, 0, 0, 0]
    assert signed.tolist() == [*range(6), 20, 7, 1, 5, 25]
    assert (payload.num_elements(3), payload.num_channels(signed), payload.num_values(signed)) == (11, 3, 20)
    assert torch.equal(payload.sums(signed), sums)
    assert payload.sums_and_num_values(signed).tolist() == [*range(6), 20]
    assert payload.with_num_values(signed, torch.tensor(8)).tolist() == [*range(6), 8, 7, 1, 5, 25]
    signed_backward = payload.sign(unsigned, 5, call_id=torch.tensor([200.0], dtype=torch.float64))
    assert signed_backward.tolist() == [*range(6), 20, 0, 1, 205, 205**2]
    assert payload.sign(unsigned, payload.UNSIGNED, 7) is unsigned


def test_cpp_has_the_same_positions() -> None:
    assert [getattr(payload, name) for name in POSITIONS] == [*range(payload.TRAILER_ELEMENTS)]
    enum = re.search(r"enum Trailer : int64_t \{ (.*) \};", (KERNELS / "cpu.cpp").read_text())
    assert enum[1].split(", ") == POSITIONS
