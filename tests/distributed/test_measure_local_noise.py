"""What measure_local_noise tells several ranks, and what it sends."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from noise_by_hand import figures_by_hand
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn
from syncbn.diagnosis import observer
from syncbn.diagnosis.this_rank import position_in
from syncbn.distributed.text_exchange import require_equal

CHANNELS = 3


def part(ranks: Ranks, rank: int, call: int = 0) -> Tensor:
    """The batch of `rank`: of a size of its own, none on the last rank in call 1; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(100 * rank + call)
    num_samples = 0 if (rank, call) == (ranks.size - 1, 1) else 2 + (rank + call) % 3
    values = torch.randn(num_samples, CHANNELS, 2, 2, generator=generator, dtype=torch.float64) * (1 + rank) + 10
    return values.to(ranks.device)


def layer(ranks: Ranks, kind: Any = nn.BatchNorm2d, **options: Any) -> nn.Module:
    return kind(CHANNELS, dtype=torch.float64, device=ranks.device, **options)


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, syncbn.SyncBatchNorm2d])
def test_figures_are_the_same_on_all_ranks(ranks: Ranks, kind: Any, num_slices: int) -> None:
    model = layer(ranks, kind)
    with syncbn.measure_local_noise(model, num_slices=num_slices) as noise:
        for call in range(2):
            model(part(ranks, ranks.rank, call))
    calls = [
        [one for rank in range(ranks.size) for one in part(ranks, rank, call).tensor_split(num_slices) if len(one)]
        for call in range(2)
    ]
    assert noise[0][3:10] == pytest.approx(figures_by_hand(calls), rel=1e-9)
    gathered: list[Any] = [None] * ranks.size
    dist.all_gather_object(gathered, tuple(noise[0]))
    assert set(gathered) == {tuple(noise[0])}


def test_each_layer_is_measured_in_its_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the default group: of this rank alone, in each spelling of a layer's group."""
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, x: x)  # which refuses CPU tensors
    alone = syncbn.create_syncbn_process_group(1)
    model = nn.Sequential(
        layer(ranks),
        layer(ranks, syncbn.SyncBatchNorm2d, process_group=1),
        layer(ranks, syncbn.SyncBatchNorm2d, process_group=alone),
        layer(ranks, nn.SyncBatchNorm, process_group=alone),
        layer(ranks, nn.SyncBatchNorm),
    )
    x = part(ranks, ranks.rank)

    def measured(**options: Any) -> list[Any]:
        with syncbn.measure_local_noise(model, **options) as noise:
            for one in model:
                one(x)
        return noise

    assert [line.split()[-2] for line in str(measured()).splitlines()[3:5]] == ["-", "-"]
    parts = [part(ranks, rank) for rank in range(ranks.size)]
    over_all = figures_by_hand([parts])
    of_alone = [over_all[0], over_all[0], 0, 0, 0, 0, 0]
    for row, expected in zip(measured(), (over_all, of_alone, of_alone, of_alone, over_all), strict=True):
        assert row[3:10] == pytest.approx(expected, rel=1e-9, abs=1e-7)  # of a variance as its root
    for row in measured(process_group=None if ranks.size == 1 else ranks.size):
        assert row[3:10] == pytest.approx(over_all, rel=1e-9)
    in_halves = figures_by_hand([[*x.tensor_split(2)]])
    for row in measured(process_group=1, num_slices=2):
        assert row[3:10] == pytest.approx(in_halves, rel=1e-9)


def fail_in_block(model: nn.Module, *inputs: Tensor) -> None:
    with syncbn.measure_local_noise(model):
        for x in inputs:
            model(x)
        raise KeyError("no such image")


def test_what_it_sends(ranks: Ranks) -> None:
    """Nothing inside the block, then four collectives; nothing at all after an exception."""
    model, x = nn.Sequential(*[layer(ranks) for _ in range(4)]), part(ranks, ranks.rank)
    with CountCollectives() as counted:
        with syncbn.measure_local_noise(model):
            model(x)
            model(x)
            assert counted.total == 0
        assert counted.total == 4
    with CountCollectives() as counted, pytest.raises(KeyError):
        fail_in_block(model, x)
    assert counted.total == 0


def test_a_rank_that_fails_meets_no_other(ranks: Ranks) -> None:
    """What it sends next pairs with what the others, who are not in a block, send."""
    if ranks.rank == 0:
        with pytest.raises(KeyError):
            fail_in_block(layer(ranks))
    assert ranks.total(torch.ones(1, device=ranks.device)) == ranks.size


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("layers", r"first in:\nrank 0: 1: 3 channels, called 1 times\nranks? 1.*: nothing more$"),
        ("calls", r"first in:\nrank 0: 0: 3 channels, called 2 times\nranks? 1.*: 0: 3 channels, called 1 times$"),
        ("slices", r"first in:\nrank 0: num_slices=2\nranks? 1.*: num_slices=1$"),
        ("last of many", r"rank 0: 300: 4 channels, called 0 times\nranks? 1.*: 300: 3 channels, called 0 times$"),
    ],
)
def test_ranks_that_differ_raise_everywhere(ranks: Ranks, what: str, words: str) -> None:
    first = ranks.rank == 0
    model = nn.Sequential(layer(ranks), layer(ranks) if first or what != "layers" else nn.Identity())
    if what == "last of many":
        model = nn.Sequential(*[layer(ranks) for _ in range(300)], nn.BatchNorm2d(3 + first))

    def block() -> None:
        with syncbn.measure_local_noise(model, num_slices=2 if first and what == "slices" else 1):
            for _ in range(0 if what == "last of many" else 2 if first and what == "calls" else 1):
                model(part(ranks, ranks.rank))

    with pytest.raises(ValueError, match=words):
        block()


def test_a_layer_that_one_rank_cannot_read_is_left_out_on_all(ranks: Ranks) -> None:
    model = nn.Sequential(layer(ranks), layer(ranks))
    with syncbn.measure_local_noise(model) as noise:
        x = part(ranks, ranks.rank)
        model[0](x)
        with pytest.raises(RuntimeError) if ranks.rank == 0 else contextlib.nullcontext():
            model[1](x[:, :2] if ranks.rank == 0 else x)
    assert [row.layer for row in noise] == ["0"]
    assert noise.not_measured.keys() == {"1"}
    assert noise.not_measured["1"].startswith("rank 0: expected 3 channels")


@pytest.mark.parametrize("converted", [False, True])
def test_training_is_bitwise_the_same(ranks: Ranks, converted: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 2, 1)).double()
    if converted:
        syncbn.convert_syncbn_model(model)

    def train(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(ranks.rank)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for call in (0, 2, 3):
            optimizer.zero_grad()
            ddp(part(ranks, ranks.rank, call)).square().mean().backward()
            optimizer.step()
        return [*model.state_dict().values(), *(one.grad for one in model.parameters()), torch.get_rng_state()]

    model.to(ranks.device)
    same = copy.deepcopy(model)
    expected = train(model)
    with syncbn.measure_local_noise(same) as noise:
        tensors = train(same)
    assert all(map(torch.equal, tensors, expected))
    assert [row.num_calls for row in noise] == [3]


def test_not_inside_join(ranks: Ranks) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), syncbn.SyncBatchNorm(2)).to(ranks.device))
    with (
        syncbn.join(ddp),
        pytest.raises(RuntimeError, match=r"cannot be used inside syncbn\.join"),
        syncbn.measure_local_noise(ddp),
    ):
        pass


def test_the_exchange_at_the_end_is_a_wait_that_is_told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with fewer steps than others stand there; and no synchronised layer may have started the watchdog."""
    seen = []

    def look(*arguments: Any) -> None:
        collective = observer.this_rank().waiting
        seen.append(collective and position_in(collective).doing.partition(", ")[0])
        require_equal(*arguments)

    monkeypatch.setattr("syncbn.tools.measure_local_noise.require_equal", look)
    with syncbn.measure_local_noise(layer(ranks)):
        pass
    assert seen == ["measure_local_noise exchange"]
    assert observer.this_rank().waiting is None
