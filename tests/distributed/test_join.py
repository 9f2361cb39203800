"""Ranks that run out of data (pytorch#42577, #38174; Lightning#3325): training equals that of one process which has, in
each step, the batches of the ranks that still have one."""

from __future__ import annotations

import contextlib
import copy
import gc
import queue
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import CountCollectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_names import BROADCAST_BUFFERS, LAZY_BUCKETS
from voting import Ranks

import syncbn
from syncbn import torch_private
from syncbn.distributed import reduction
from syncbn.tools import join

SHARE, NUM_BATCHES = 2, 6
NUM_LAYERS = 2

# Batches of each rank, the same for further ranks as for the last.
UNEVEN = [[6, 3], [6, 1], [6, 0], [2, 6], [6, 6], [0, 6, 4], [6, 2, 4]]


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.Flatten(), nn.Linear(6 * 16, 5),
    ).double()  # fmt: skip


def num_batches_of(counts: list[int], ranks: Ranks) -> list[int]:
    """Of every rank."""
    return (counts + counts[-1:] * ranks.size)[: ranks.size]


def batches(rank: int, ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(SHARE, 1, 8, 8, generator=generator, dtype=torch.float64).to(ranks.device),
            torch.randint(5, (SHARE,), generator=generator).to(ranks.device),
        )
        for _ in range(NUM_BATCHES)
    ]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    optimizer.step()


def train_alone(ranks: Ranks, counts: list[int]) -> nn.Module:
    model = small_model().to(ranks.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(max(counts)):
        live = [batches(rank, ranks)[index] for rank, count in enumerate(counts) if index < count]
        step(model, optimizer, *(torch.cat(parts) for parts in zip(*live, strict=True)))
    return model


def make_ddp(ranks: Ranks, **options: object) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    ddp = DistributedDataParallel(model, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def require_equal_state(actual: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_equals_one_process(ranks: Ranks, counts: list[int], broadcast_buffers: bool) -> None:
    """Twice in a row, and even steps between: the context leaves nothing behind."""
    counts = num_batches_of(counts, ranks)
    alone = train_alone(ranks, counts)
    ddp, optimizer = make_ddp(ranks, **{BROADCAST_BUFFERS: broadcast_buffers})
    own = batches(ranks.rank, ranks)[: counts[ranks.rank]]
    with syncbn.join(ddp, divide_by_initial_world_size=False):
        for x, labels in own:
            step(ddp, optimizer, x, labels)
    require_equal_state(ddp.module, alone)


@pytest.mark.skipif(not LAZY_BUCKETS, reason="torch 2.15 is the first")
@pytest.mark.parametrize("counts", [[6, 3], [6, 0], [0, 6, 4]], ids=str)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("manual", [False, True])
def test_lazy_buckets_and_manual_finalization(
    ranks: Ranks, counts: list[int], options: dict[str, bool], manual: bool
) -> None:
    """Buckets that exist in backward alone, also of a joined rank, and a backward that the caller ends."""
    counts = num_batches_of(counts, ranks)
    ddp, optimizer = make_ddp(ranks, bucket_cap_mb=1e-3, **LAZY_BUCKETS, **options)
    ddp.require_manual_backward_finalization = manual
    with syncbn.join(ddp, divide_by_initial_world_size=False):
        for x, labels in batches(ranks.rank, ranks)[: counts[ranks.rank]]:
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), labels).backward()
            if manual:
                ddp.finalize_backward()
            optimizer.step()
    require_equal_state(ddp.module, train_alone(ranks, counts))


def test_the_context_leaves_nothing_behind(ranks: Ranks) -> None:
    """Steps after it, and a second one, are as usual."""
    counts = num_batches_of([3, 1], ranks)
    ddp, optimizer = make_ddp(ranks)
    own = batches(ranks.rank, ranks)
    num_groups = len(torch_private.existing_groups())
    for _ in range(2):
        with syncbn.join(ddp):
            for x, labels in own[: counts[ranks.rank]]:
                step(ddp, optimizer, x, labels)
        assert reduction.joined_group() is None
        assert len(torch_private.existing_groups()) == num_groups
        with CountCollectives() as mode:
            ddp.module(own[0][0])
        assert mode.total == NUM_LAYERS
        ddp(own[0][0]).sum().backward()


def test_gradients_are_divided_by_the_ranks_that_began_or_by_those_that_are_left(ranks: Ranks) -> None:
    """As Join does; rank 0 alone has a batch."""
    gradients = []
    for by_initial in (True, False):
        ddp, _ = make_ddp(ranks)
        with syncbn.join(ddp, divide_by_initial_world_size=by_initial):
            if ranks.rank == 0:
                x, labels = batches(0, ranks)[0]
                F.cross_entropy(ddp(x), labels).backward()
        gradients.append([parameter.grad for parameter in ddp.parameters()])
    if ranks.rank == 0:
        for shared, own in zip(*gradients, strict=True):
            torch.testing.assert_close(shared * ranks.size, own)


def test_layers_in_another_order_in_each_step(ranks: Ranks) -> None:
    """The finished need not know which layer comes: accumulated gradients, evaluation, two forwards, recomputation."""
    model = nn.ModuleList(syncbn.SyncBatchNorm1d(num) for num in (3, 5)).double().to(ranks.device)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            return sum(self.layers[which](x[:, : (3, 5)[which]]).pow(3).sum() for which in order)

    ddp = DistributedDataParallel(Both())
    with syncbn.join(ddp):
        if ranks.rank == 0:
            x = torch.randn(4, 5, dtype=torch.float64, device=ranks.device, requires_grad=True)
            for order in ([0, 1], [1, 0], [1, 0, 1]):
                ddp(x, order).backward()
            ddp.module.eval()(x, [0, 1])  # Join takes a forward of ddp itself for a step, with its backward
            ddp.module.train()
            with ddp.no_sync():
                ddp(x, [1, 0]).backward()
    if ranks.rank == 0:
        assert model[1].num_batches_tracked == 5
    counts = [torch.zeros_like(model[1].num_batches_tracked) for _ in range(ranks.size)]
    dist.all_gather(counts, model[1].num_batches_tracked)
    assert {int(count) for count in counts} == {5}


def test_the_number_of_collectives(ranks: Ranks) -> None:
    """One more before each of ours and before each forward of the model; DDP's and Join's own are torch's."""
    ddp, optimizer = make_ddp(ranks, **{BROADCAST_BUFFERS: False})
    x, labels = batches(ranks.rank, ranks)[0]
    step(ddp, optimizer, x, labels)  # in its first step DDP rebuilds its buckets
    step(ddp, optimizer, x, labels)

    def count(run: Callable[[], object]) -> int:
        with CountCollectives() as mode:
            run()
        return mode.total

    plain = count(lambda: ddp.module(x).sum().backward())
    assert plain == 2 * NUM_LAYERS
    with syncbn.join(ddp):
        inside = count(lambda: ddp.module(x).sum().backward())
        assert inside == 2 * plain


STAGES = ["before the forward", "between forward and backward", "after the step"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("finished_rank", [False, True])
def test_an_exception_wakes_all(ranks: Ranks, stage: str, finished_rank: bool) -> None:
    """Rank 0 fails in its third step; the last rank may have been finished by then."""
    if finished_rank and stage == STAGES[1]:
        pytest.skip("Join itself then waits for the backward, until the failed process ends")
    ddp, optimizer = make_ddp(ranks)
    own = batches(ranks.rank, ranks)
    if finished_rank and ranks.rank == ranks.size - 1:
        own = own[:1]

    def fail(index: int, now: str) -> None:
        if ranks.rank == 0 and index == 2 and stage == now:
            raise KeyError("no such image")

    error = KeyError if ranks.rank == 0 else RuntimeError
    message = "no such image" if ranks.rank == 0 else "another rank failed: rank 0: KeyError: 'no such image'"

    def train() -> None:
        for index, (x, labels) in enumerate(own):
            fail(index, STAGES[0])
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), labels)
            fail(index, STAGES[1])
            loss.backward()
            optimizer.step()
            fail(index, STAGES[2])

    with pytest.raises(error, match=message), syncbn.join(ddp):
        train()


def test_a_forward_without_gradients_is_refused(ranks: Ranks) -> None:
    """The ranks that have finished would wait for its backward. Rank 0 evaluates at its end."""
    ddp, _ = make_ddp(ranks)
    own = batches(ranks.rank, ranks)[: 2 if ranks.rank == 0 else 1]
    expected = "without gradients call" if ranks.rank == 0 else "another rank failed: rank 0: RuntimeError: inside"

    def train() -> None:
        for x, _ in own:
            ddp(x).sum().backward()
        if ranks.rank == 0:
            with torch.no_grad():
                ddp.eval()(x)

    with pytest.raises(RuntimeError, match=expected), syncbn.join(ddp):
        train()


def test_a_bad_batch_is_raised_on_every_rank_that_has_one(ranks: Ranks) -> None:
    """The exchange of faults goes through the finished ranks; training may even go on."""
    if ranks.device.type != "cpu":
        pytest.skip("nothing is read on the host of a GPU")
    ddp, _ = make_ddp(ranks)
    own = batches(ranks.rank, ranks)[: 1 if ranks.rank == ranks.size - 1 else 2]
    raised = []
    with syncbn.join(ddp):
        for index, (x, _) in enumerate(own):
            if index == 1:
                bad = torch.randn(2, 3, 4, 4) if ranks.rank == 0 else torch.randn(2, 4, 4, 4)
                with pytest.raises(ValueError, match=r"rank 0: expected 4 channels .* got 3"):
                    ddp.module[1](bad.double())
                raised.append(index)
            ddp(x).sum().backward()
    assert raised == ([] if ranks.rank == ranks.size - 1 else [1])


def test_what_cannot_be_joined_is_refused_on_entry(ranks: Ranks) -> None:
    ddp, _ = make_ddp(ranks)
    with (
        pytest.raises(TypeError, match="needs one DistributedDataParallel, got Sequential"),
        syncbn.join(small_model()),
    ):
        pass
    inner = copy.deepcopy(ddp.module)
    inner[1].compile(backend="eager")
    with (
        pytest.raises(TypeError, match="one DistributedDataParallel, got Opt"),
        syncbn.join(torch.compile(ddp, backend="eager")),
    ):
        pass
    with pytest.raises(TypeError, match=r"compiled are: module\.1"), syncbn.join(DistributedDataParallel(inner)):
        pass
    with pytest.raises(RuntimeError, match="cannot be entered inside"), syncbn.join(ddp), syncbn.join(ddp):
        pass
    ddp.module[4].process_group = 1
    with pytest.raises(ValueError, match=r"all \d ranks, but not so: module.4 over 1"), syncbn.join(ddp):
        pass


def run_second_model(model: nn.Module, second: nn.Module, x: Tensor) -> None:
    second(x)


def run_compiled(model: nn.Module, second: nn.Module, x: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(x)


def run_selectively_checkpointed(model: nn.Module, second: nn.Module, x: Tensor) -> None:
    def recompute(*_: object, **__: object) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = partial(create_selective_checkpoint_contexts, recompute)
    checkpoint(model, x, use_reentrant=False, context_fn=context_fn)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_second_model, "joins one model, and here runs a second"),
        (run_compiled, "nothing may be compiled"),
        (run_selectively_checkpointed, "checkpointing may not be selective"),
    ],
)
def test_what_cannot_be_joined_is_refused_inside(
    ranks: Ranks, run: Callable[[nn.Module, nn.Module, Tensor], None], message: str
) -> None:
    """Before the ranks that are finished wait for it."""
    (ddp, _), (second, _) = make_ddp(ranks), make_ddp(ranks)

    def body() -> None:
        if ranks.rank == 0:
            run(ddp.module, second, batches(0, ranks)[0][0])

    with pytest.raises(Exception, match=message), syncbn.join(ddp):
        body()
    gc.collect()  # torch 2.11 leaves the mode of a selective checkpoint that raised only with its generator


def test_a_call_over_a_part_of_the_ranks_inside_is_refused(ranks: Ranks) -> None:
    if ranks.size != 4:
        pytest.skip("needs two groups of two")
    pair = syncbn.create_syncbn_process_group(2)
    ddp, _ = make_ddp(ranks)
    x = torch.randn(2, 3, device=ranks.device)
    with pytest.raises(ValueError, match="must synchronise over all 4 ranks, not over 2"), syncbn.join(ddp):
        syncbn.functional.sync_batch_norm(x, None, None, training=True, process_group=pair)


def test_a_joined_rank_sends_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where Join lets the default stream wait for the other ranks, which wait for what is sent. What that
    stream needs is made on entry, while nothing waits."""
    device, streams = torch.device("cuda", 1), ["default"]

    @contextlib.contextmanager
    def stream(of: torch.device) -> Iterator[None]:
        streams.append(f"stream of {of}")
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    session = object.__new__(join._Session)
    session.device, session.iterations, session.error = device, queue.SimpleQueue(), None
    session.shadow = lambda iteration: happened.append(f"shadow on {streams[-1]}")
    session.give_zeros = lambda length: happened.append(f"send {length} on {streams[-1]}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append(f"synchronize {device}"))
    happened: list[str] = []
    session.warm_up()
    session.serve()
    assert happened == [f"send 1 on stream of {device}", f"synchronize {device}", f"shadow on stream of {device}"]
    assert streams == ["default"]
    assert session.error is None
