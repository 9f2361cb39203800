"""Tests that Python and Triton read and write the same positions of a payload."""

import pytest
import torch

from syncbn import payload

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


def test_the_positions_in_triton() -> None:
    channels = pytest.importorskip("syncbn.kernels.gpu_channels")
    for name in (*POSITIONS, "NUM_IDS"):
        assert getattr(channels, name).value == getattr(payload, name)
    assert payload.NUM_IDS & (payload.NUM_IDS - 1) == 0, "gpu_channels.py divides by a mask"
