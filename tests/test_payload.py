"""Tests that cpu.cpp repeats the positions of payload.py. The kernels of Triton import the positions."""

import re
from pathlib import Path

import syncbn
from syncbn import payload

POSITIONS = ["NUM_VALUES", "COUNT", "IS_SIGNED", "SIGNATURE", "SQUARE"]


def test_cpp_has_the_positions_of_a_trailer_in_the_same_order() -> None:
    assert [getattr(payload, name) for name in POSITIONS] == [*range(payload.TRAILER_ELEMENTS)]
    source = (Path(syncbn.__file__).parent / "kernels" / "cpu.cpp").read_text()
    enum = re.search(r"enum Trailer : int64_t \{ (.*) \};", source)
    assert enum[1].split(", ") == POSITIONS
