"""Catches local noise whose figures differ between ranks or come from the wrong group, and collectives that it adds.

On one process it is in tests/test_measure_local_noise.py.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from noise_by_hand import figures_by_hand
from torch import Tensor, nn
from voting import Ranks

import syncbn
from syncbn.comm.text_exchange import all_gather_json
from syncbn.diagnosis import watchdog

CHANNELS = 3


def part(ranks: Ranks, rank: int, call: int = 0) -> Tensor:
    """The batch of `rank`: of a size of its own, none on the last rank in call 1; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(100 * rank + call)
    num_samples = 0 if (rank, call) == (ranks.size - 1, 1) else 2 + (rank + call) % 3
    values = torch.randn(num_samples, CHANNELS, 2, 2, generator=generator, dtype=torch.float64) * (1 + rank) + 10
    return values.to(ranks.device)


def layer(ranks: Ranks, kind: Any = nn.BatchNorm2d, **options: Any) -> nn.Module:
    return kind(CHANNELS, dtype=torch.float64, device=ranks.device, **options)


@pytest.mark.parametrize(("kind", "num_slices"), [(nn.BatchNorm2d, 2), (syncbn.SyncBatchNorm2d, 1)])
def test_figures_are_the_same_on_all_ranks(ranks: Ranks, kind: Any, num_slices: int) -> None:
    model = layer(ranks, kind)
    with syncbn.measure_local_noise(model, num_slices=num_slices) as noise:
        for call in range(2):
            model(part(ranks, ranks.rank, call))
    calls = [
        [one for rank in range(ranks.size) for one in part(ranks, rank, call).tensor_split(num_slices) if len(one)]
        for call in range(2)
    ]
    assert noise[0][3:8] == pytest.approx(figures_by_hand(calls), rel=1e-9)
    assert {*all_gather_json(str([*noise[0]]), dist.group.WORLD)} == {str([*noise[0]])}


def test_each_layer_is_measured_in_its_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the default group: of this rank alone, as ours and as torch's layer have it."""
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, x: x)  # which refuses CPU tensors
    alone = syncbn.create_syncbn_process_group(1)
    model = nn.Sequential(
        layer(ranks),
        layer(ranks, syncbn.SyncBatchNorm2d, process_group=1),
        layer(ranks, nn.SyncBatchNorm, process_group=alone),
    )
    x = part(ranks, ranks.rank)
    over_all = figures_by_hand([[part(ranks, rank) for rank in range(ranks.size)]])
    of_alone = [over_all[0], over_all[0], 0, 0, 0]
    for options, expected in (
        ({"process_group": ranks.size}, [over_all] * 3),
        ({"process_group": 1, "num_slices": 2}, [figures_by_hand([[*x.tensor_split(2)]])] * 3),
        ({}, [over_all, of_alone, of_alone]),
    ):
        with syncbn.measure_local_noise(model, **options) as noise:
            for one in model:
                one(x)
        for row, figures in zip(noise, expected, strict=True):
            assert row[3:8] == pytest.approx(figures, rel=1e-9, abs=1e-7)  # of a variance as its root


def test_what_it_sends(ranks: Ranks) -> None:
    """Nothing inside the block, then a text and two sums a layer; nothing after an exception, which leaves nothing."""
    model, x = nn.Sequential(layer(ranks), layer(ranks)), part(ranks, ranks.rank)
    with CountCollectives() as counted:
        with syncbn.measure_local_noise(model):
            model(x)
            assert counted.total == 0
        assert counted.total == 1 + 2 * 2
        with pytest.raises(ValueError, match="expected 4D"), syncbn.measure_local_noise(model) as noise:
            model(x[0])
        assert counted.total == 1 + 2 * 2
    assert not noise
    assert not model[0]._forward_hooks


def test_ranks_that_differ_raise_everywhere(ranks: Ranks) -> None:
    """In num_slices, in calls, or in a layer that one rank cannot measure."""
    model, is_first = layer(ranks), ranks.rank == 0
    for num_slices, num_calls, channel_last, of_first, of_others in (
        (1 + is_first, 1, False, "num_slices=2", "num_slices=1"),
        (1, 1 + is_first, False, r"\(the model\): 3 channels, 2 calls", r"\(the model\): 3 channels, 1 calls"),
        (1, 1, is_first, r"\(the model\): 3 channels, 0 calls", r"\(the model\): 3 channels, 1 calls"),
    ):
        model.channel_last = channel_last
        noise = syncbn.measure_local_noise(model, num_slices=num_slices)
        with pytest.raises(ValueError, match=rf"first in:\nrank 0: {of_first}\nranks? 1.*: {of_others}$"), noise:
            nn.Sequential(*[model] * num_calls)(part(ranks, ranks.rank))


def test_the_exchange_at_the_end_is_a_wait_that_is_told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with fewer steps wait there, which is reported though no synchronised layer has started the watchdog."""
    waits: list[Any] = []
    look = lambda *_: waits.extend(watchdog.this_rank().waiting)  # noqa: E731
    monkeypatch.setattr("syncbn.tools.measure_local_noise.require_equal", look)
    with syncbn.measure_local_noise(layer(ranks)):
        pass
    assert waits[0].position().doing.startswith("measure_local_noise exchange, ")
