"""Catches ranks out of data that hang others, or change what these train (pytorch#42577, #38174; Lightning#3325).

In each step one process has the batches of the ranks that still have one.
"""

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch_names import BROADCAST_BUFFERS, LAZY_BUCKETS
from training import SHARE, mine, require_equal_state, small_model, train, whole_batches
from voting import Ranks

import syncbn
from syncbn.tools import join as join_module
from syncbn.torch_internals.distributed import existing_groups

NUM_BATCHES, NUM_LAYERS = 6, 2


def batches(ranks: Ranks, num: int = NUM_BATCHES) -> tuple[Tensor, Tensor]:
    """This rank's."""
    x, labels = mine(ranks, *whole_batches(ranks, NUM_BATCHES))
    return x[:num], labels[:num]


def make_ddp(ranks: Ranks, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(syncbn.convert_syncbn_model(small_model()).to(ranks.device), **options)


def require_trains_as_one(
    ranks: Ranks, ddp: DistributedDataParallel, counts: list[int], after_backward: Callable[[], object] = lambda: None
) -> None:
    """With so many batches on each rank; further ranks have as many as the last of `counts`."""
    counts = (counts + counts[-1:] * ranks.size)[: ranks.size]
    with syncbn.join(ddp, divide_by_initial_world_size=False):
        train(ddp, *batches(ranks, counts[ranks.rank]), after_backward)
    alone, (x, labels) = small_model().to(ranks.device), whole_batches(ranks, NUM_BATCHES)
    steps_of_sample = torch.tensor(counts, device=ranks.device).repeat_interleave(SHARE)
    live = [steps_of_sample > step for step in range(max(counts))]
    train(alone, *([one[step, now] for step, now in enumerate(live)] for one in (x, labels)))
    require_equal_state(ddp.module, alone)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize(
    "counts",
    [
        [6, 3],
        [6, 0],  # a rank that has nothing at all
        [2, 6],  # rank 0, whose buffers DDP would broadcast, ends first
        [6, 6],  # nobody ends early
        [0, 6, 4],  # on three ranks and more, one after another
    ],
    ids=str,
)
def test_equals_one_process(ranks: Ranks, counts: list[int], broadcast_buffers: bool) -> None:
    require_trains_as_one(ranks, make_ddp(ranks, **{BROADCAST_BUFFERS: broadcast_buffers}), counts)


@pytest.mark.skipif(not LAZY_BUCKETS, reason="torch 2.15 is the first")
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_lazy_buckets_and_manual_finalization(ranks: Ranks, option: str, manual: bool) -> None:
    """Buckets that exist in backward alone, also of a joined rank, and a backward that the caller ends."""
    ddp = make_ddp(ranks, bucket_cap_mb=1e-3, **LAZY_BUCKETS, **{option: True})
    ddp.require_manual_backward_finalization = manual
    require_trains_as_one(ranks, ddp, [0, 6, 4], ddp.finalize_backward if manual else lambda: None)


def test_collectives_inside_and_after(ranks: Ranks) -> None:
    """Inside, one more collective precedes each of ours; steps after it, and a second context, send as many as ever."""
    ddp, (x, labels) = make_ddp(ranks), batches(ranks, 1 if ranks.rank else 3)
    num_groups = len(existing_groups())

    def count() -> int:
        with CountCollectives() as mode:
            ddp.module(x[0]).sum().backward()
        return mode.total

    for _ in range(2):
        with syncbn.join(ddp):
            assert count() == 2 * 2 * NUM_LAYERS
            train(ddp, x, labels)
        assert count() == 2 * NUM_LAYERS
        assert len(existing_groups()) == num_groups
        ddp(x[0]).sum().backward()


def test_gradients_are_divided_by_the_ranks_that_began_or_by_those_that_are_left(ranks: Ranks) -> None:
    """As Join does; rank 0 alone has a batch."""
    gradients = []
    for by_initial in (True, False):
        ddp = make_ddp(ranks)
        with syncbn.join(ddp, divide_by_initial_world_size=by_initial):
            train(ddp, *batches(ranks, 0 if ranks.rank else 1))
        gradients.append([parameter.grad for parameter in ddp.parameters()])
    if ranks.rank == 0:
        torch.testing.assert_close([shared * ranks.size for shared in gradients[0]], gradients[1])


def test_layers_in_another_order_in_each_step(ranks: Ranks) -> None:
    """The finished need not know which layer comes: accumulated gradients, evaluation, two forwards, recomputation."""

    class Both(nn.ModuleList):
        def forward(self, x: Tensor, order: list[int]) -> Tensor:
            return sum(self[which](x[:, : (3, 5)[which]]).pow(3).sum() for which in order)

    ddp = DistributedDataParallel(Both(syncbn.SyncBatchNorm1d(num) for num in (3, 5)).double().to(ranks.device))
    with syncbn.join(ddp):
        if ranks.rank == 0:
            x = torch.randn(4, 5, dtype=torch.float64, device=ranks.device, requires_grad=True)
            for order in ([0, 1], [1, 0], [1, 0, 1]):
                ddp(x, order).backward()
            ddp.module.eval()(x, [0, 1])  # Join takes a forward of ddp itself for a step, with its backward
            ddp.module.train()
            with ddp.no_sync():
                ddp(x, [1, 0]).backward()
    assert ddp.module[1].num_batches_tracked == 5


STAGES = ["before the forward", "between forward and backward", "after the backward"]


@pytest.mark.parametrize(
    ("stage", "finished_rank"),
    # Not between forward and backward with a finished rank: Join itself waits there, until the failed process ends.
    [(STAGES[0], False), (STAGES[0], True), (STAGES[1], False), (STAGES[2], True)],
)
def test_an_exception_wakes_all(ranks: Ranks, stage: str, finished_rank: bool) -> None:
    """Rank 0 fails in its third step; the last rank may have been finished by then."""
    is_finished = finished_rank and ranks.rank == ranks.size - 1
    ddp, (x, labels) = make_ddp(ranks), batches(ranks, 1 if is_finished else NUM_BATCHES)
    error, message = RuntimeError, r"another rank failed: rank 0: OSError: cannot read \\udcff.png"
    if ranks.rank == 0:
        error, message = OSError, "cannot read \udcff.png"
    calls = itertools.count()

    def fail(now: str) -> None:
        if ranks.rank == 0 and stage == now and next(calls) == 2:
            raise OSError("cannot read \udcff.png")  # a name that is not UTF-8: os.listdir gives such

    def images() -> Iterator[Tensor]:
        for image in x:
            fail(STAGES[0])
            yield image

    ddp.register_forward_hook(lambda *_: fail(STAGES[1]))
    with pytest.raises(error, match=message), syncbn.join(ddp):
        train(ddp, images(), labels, lambda: fail(STAGES[2]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is read on the host of a GPU")
def test_a_bad_batch_is_raised_on_every_rank_that_has_one(ranks: Ranks) -> None:
    """The exchange of faults goes through the finished ranks; training may even go on."""
    has_one = ranks.rank < ranks.size - 1
    ddp, (x, _) = make_ddp(ranks), batches(ranks, 2)
    with syncbn.join(ddp):
        ddp(x[0]).sum().backward()
        if has_one:
            with pytest.raises(ValueError, match=r"expected 4 channels .* got 3"):
                ddp.module[0][1](x.new_ones(2, 4 if ranks.rank else 3, 4, 4))
            ddp(x[1]).sum().backward()


def test_what_cannot_be_joined_is_refused_on_entry(ranks: Ranks) -> None:
    def refused(model: nn.Module, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message), syncbn.join(model):
            pass

    ddp = make_ddp(ranks)
    refused(small_model(), TypeError, "needs one DistributedDataParallel, got Sequential")
    refused(torch.compile(ddp, backend="eager"), TypeError, "one DistributedDataParallel, got Opt")
    inner = copy.deepcopy(ddp.module)
    inner[0].compile(backend="eager")
    refused(DistributedDataParallel(inner), TypeError, r"compiled are: module\.0")
    with syncbn.join(ddp):
        refused(ddp, RuntimeError, "cannot be used inside")
    ddp.module[1][1].process_group = 1
    refused(ddp, ValueError, r"all \d ranks, but these do not: module.1.1 \(1 rank\)")


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_LAUNCH_BLOCKING", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8")],
)
def test_kernels_one_at_a_time_are_refused_under_nccl(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """On every rank, if one has the variable: a finished rank waits in two of nccl's kernels at once."""
    ddp = make_ddp(ranks)
    if ranks.device.type == "cpu":  # stands for a GPU
        monkeypatch.setattr(DistributedDataParallel, "join_device", torch.device("cuda"))
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    if ranks.rank == 0:
        monkeypatch.setenv(name, value)
    if value == "8":
        join_module._require_kernels_at_once(ddp.join_device)
        return
    others = "another rank failed.\nrank 0: ValueError: " if ranks.rank else "^"
    message = f"{others}syncbn.join may wait for ever under nccl with the environment variable {name}=1; leave it unset"
    with pytest.raises(ValueError, match=message), syncbn.join(ddp):
        pass


SELECTIVE = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, [])}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:Using .torch.compile.module.. when there are global hooks")
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda _, second, x: second(x), "joins one model, and here runs a second"),
        (lambda ddp, _, x: torch.no_grad()(ddp.eval())(x), "without gradients call"),
        (lambda ddp, _, x: torch.compile(ddp.module, backend="eager", fullgraph=True)(x), "nothing may be compiled"),
        (lambda ddp, _, x: checkpoint(ddp.module, x, **SELECTIVE), "checkpointing may not be selective"),
    ],
)
def test_what_cannot_be_joined_is_refused_inside(ranks: Ranks, run: Callable[..., None], message: str) -> None:
    """Before the ranks that are finished wait for it."""
    ddp, second, body = make_ddp(ranks), make_ddp(ranks), run if ranks.rank == 0 else lambda *_: None
    with pytest.raises(Exception, match=message), syncbn.join(ddp):
        body(ddp, second, batches(ranks)[0][0])
    gc.collect()  # torch 2.11 leaves the mode of a selective checkpoint that raised only with its generator


def test_a_call_over_a_part_of_the_ranks_inside_is_refused(ranks: Ranks) -> None:
    if ranks.size != 4:
        pytest.skip("needs two groups of two")
    pair, ddp = syncbn.create_syncbn_process_group(2), make_ddp(ranks)
    x = torch.randn(2, 3, device=ranks.device)
    with pytest.raises(ValueError, match="must synchronise over all 4 ranks, not over 2"), syncbn.join(ddp):
        syncbn.functional.sync_batch_norm(x, None, None, training=True, process_group=pair)
