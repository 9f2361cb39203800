"""Process groups that torch.distributed did not make, as torchft's: what counts is their all_reduce alone."""

import copy
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.ranks import groups
from syncbn.ranks.unregistered import UnregisteredGroup

C = 3


class UsersGroup(dist.ProcessGroup):
    """A group that only adds up; `change` then changes the total in place."""

    def __init__(self, change: Callable[[Tensor], object] = lambda total: None) -> None:
        super().__init__(0, 1)
        self.change = change

    def allreduce(self, tensors: list[Tensor], options: object = None) -> dist.Work:
        work = dist.group.WORLD.allreduce(tensors, options)
        work.wait()
        self.change(tensors[0])
        return work

    def size(self) -> int:
        raise NotImplementedError("size")


class InPython(dist.ProcessGroup):
    """A backend that is written in Python, by way of the default group; torch's new_group makes it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: list[Tensor], options: object = None) -> dist.Work:
        return dist.group.WORLD.allreduce(tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: object) -> dist.Work:
        return dist.group.WORLD.allgather(outputs, inputs, *options)


def batch_of(ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The whole batch, and this rank's slice: rank r has r + 1 samples, the last none."""
    sizes = [*range(1, ranks.size), 0] if ranks.size > 2 else [4, 1]
    torch.manual_seed(0)
    whole = torch.randn(sum(sizes), C, dtype=torch.float64, device=ranks.device)
    return whole, whole[ranks.slices(sizes)]


def layer_over(group: dist.ProcessGroup, ranks: Ranks) -> syncbn.SyncBatchNorm1d:
    return syncbn.SyncBatchNorm1d(C, process_group=group, dtype=torch.float64, device=ranks.device)


def test_trains_as_one_process(ranks: Ranks) -> None:
    """n and the number of ranks come from the payload: size() raises. Reported for torchft's groups, issue 45."""
    whole, local = batch_of(ranks)
    layer, expected = layer_over(UsersGroup(), ranks), nn.BatchNorm1d(C, device=ranks.device).double()
    expected_x, x = whole.clone().requires_grad_(), local.clone().requires_grad_()
    expected_y, y = expected(expected_x), layer(x)
    (expected_y * whole).sum().backward()
    (y * local).sum().backward()
    assert layer._synchronised_ranks == ranks.size * ranks.device.type.startswith("cpu")  # a GPU's total is not read
    torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()))
    torch.testing.assert_close(ranks.total(layer.weight.grad), expected.weight.grad)
    everyone: list[tuple[Tensor, Tensor]] = [(y, y)] * ranks.size
    dist.all_gather_object(everyone, (y.detach().cpu(), x.grad.cpu()))
    for parts, whole_tensor in zip(zip(*everyone, strict=True), (expected_y, expected_x.grad), strict=True):
        torch.testing.assert_close(torch.cat(parts), whole_tensor.cpu())


def test_every_road_adds_up(ranks: Ranks) -> None:
    """Functional forms, second derivatives, a mask."""
    whole, local = batch_of(ranks)
    group, mask = UsersGroup(), torch.ones(len(local), dtype=torch.bool, device=ranks.device)
    expected = nn.functional.batch_norm(whole, None, None, training=True)
    mean = whole.mean(0)
    for y in (
        sync_batch_norm(local, None, None, training=True, process_group=group),
        layer_over(group, ranks)(local, mask=mask),
    ):
        torch.testing.assert_close(ranks.total((y * local).sum(0)), (expected * whole).sum(0))
        torch.testing.assert_close(ranks.total(y.sum(0)), torch.zeros_like(mean))
    x = local.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((layer_over(group, ranks)(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    whole_x = whole.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        (nn.functional.batch_norm(whole_x, None, None, training=True) ** 3).sum(), whole_x, create_graph=True
    )
    (whole_second,) = torch.autograd.grad(gradient.square().sum(), whole_x)
    torch.testing.assert_close(ranks.total(second.square().sum(0)), whole_second.square().sum(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's total is not read")
class TestOnCpu:
    def test_a_fault_is_an_error_on_every_rank(self, ranks: Ranks) -> None:
        layer, (_, local) = layer_over(UsersGroup(), ranks), batch_of(ranks)
        words = (
            "expected 3 channels"
            if ranks.rank == 1
            else "UsersGroup, which torch.distributed did not make; another rank"
        )
        with pytest.raises(ValueError, match=words):
            layer(local[:, :2] if ranks.rank == 1 else local)
        layer(local)
        assert layer.num_batches_tracked == 1

    def test_a_group_that_averages_is_refused(self, ranks: Ranks) -> None:
        layer = layer_over(UsersGroup(lambda total: total.div_(ranks.size)), ranks)
        with pytest.raises(RuntimeError, match=r"averages where it should add up"):
            layer(batch_of(ranks)[1])
        assert layer.num_batches_tracked == 0
        layer.process_group = UsersGroup()
        layer(batch_of(ranks)[1])

    def test_ranks_in_different_passes_or_dtypes(self, ranks: Ranks) -> None:
        layer = layer_over(UsersGroup(), ranks)
        x = torch.randn(2, C, dtype=torch.float64 if ranks.rank else torch.float32)
        with pytest.raises(
            RuntimeError, match=r"different passes, or have inputs of different dtypes; all must do the same"
        ):
            layer(x)

    def test_a_total_that_is_not_reduced_in_backward_warns(self, ranks: Ranks) -> None:
        """torchft's Manager returns what was sent once a rank has gone, and has the step discarded."""
        group = UsersGroup()
        y = layer_over(group, ranks)(batch_of(ranks)[1].clone().requires_grad_())
        group.allreduce = lambda tensors, options: dist.group.WORLD.barrier()
        with pytest.warns(UserWarning, match=rf"forward has added up {ranks.size} ranks and backward 1. .* discard it"):
            y.sum().backward()

    def test_a_rank_whose_payload_is_zeroed_does_not_count(self, ranks: Ranks) -> None:
        """As torchft's Manager does to a replica that heals."""
        group = UsersGroup()
        layer, (whole, local) = layer_over(group, ranks), batch_of(ranks)
        last = ranks.size - 1
        if ranks.rank == last:
            add_up = group.allreduce
            group.allreduce = lambda tensors, options: add_up([tensors[0].zero_()], options)
        layer(local)
        others = whole[:4] if ranks.size == 2 else whole
        assert layer._synchronised_ranks == last
        torch.testing.assert_close(layer.running_mean, 0.1 * others.mean(0))

    def test_summary(self, ranks: Ranks) -> None:
        layer = layer_over(UsersGroup(), ranks)
        assert syncbn.summary(layer)[0].last_step == "none yet; errors of this group name no rank"
        layer(batch_of(ranks)[1])
        (row,) = syncbn.summary(layer)
        assert (row.group_size, row.forward_bytes) == (ranks.size, 8 * (2 * C + 6))
        assert row.last_step == f"synchronised over {ranks.size} ranks; errors of this group name no rank"


def test_an_all_reduce_that_fails_says_so(ranks: Ranks) -> None:
    def fail(total: Tensor) -> None:
        raise RuntimeError("the peer is gone")

    with pytest.raises(RuntimeError, match=r"UsersGroup, which .* its all_reduce failed: the peer is gone"):
        layer_over(UsersGroup(fail), ranks)(batch_of(ranks)[1])


def test_copies_share_the_group_and_pickles_drop_it(ranks: Ranks) -> None:
    group = UsersGroup()
    layer = layer_over(group, ranks)
    assert copy.deepcopy(layer).process_group is layer.process_group is group
    syncbn.assert_synced(layer)
    if ranks.size > 1:
        copied = copy.deepcopy(layer)
        copied.running_mean += ranks.rank
        with pytest.raises(AssertionError, match="running_mean"):
            syncbn.assert_synced(copied)
    loaded = pickle.loads(pickle.dumps(layer))
    assert isinstance(loaded.process_group, UnregisteredGroup)
    with pytest.raises(RuntimeError, match=r"a process group, which torch.distributed did not make.* was destroyed"):
        loaded(batch_of(ranks)[1])
    loaded.process_group = group
    loaded(batch_of(ranks)[1])


def test_what_needs_more_than_an_all_reduce_is_refused(ranks: Ranks) -> None:
    layer, local = layer_over(UsersGroup(), ranks), batch_of(ranks)[1]
    with pytest.raises(ValueError, match=r"process_group is UsersGroup, .* need a group that it made"):
        groups.resolve(layer._process_group)
    for fullgraph in (True, False):
        with pytest.raises(RuntimeError, match=r"did not make, cannot be in a compiled graph: leave out torch.compile"):
            torch.compile(layer, backend="eager", fullgraph=fullgraph)(local)


@pytest.fixture
def registered_for_this_rank(ranks: Ranks) -> Iterator[UsersGroup]:
    """As torchft's register() does it: torch's registry then says that the group is one rank. It has no name."""
    name, group = f"users-{id(ranks)}", UsersGroup()
    dist.Backend.register_backend(name, lambda *_: group, devices=[ranks.device.type])
    assert dist.new_group([ranks.rank], backend=name) is group
    yield group
    dist.distributed_c10d._world.pg_map.pop(group)  # destroy_process_group asks for its name


def test_a_group_that_registers_itself_for_this_rank_alone(registered_for_this_rank: UsersGroup, ranks: Ranks) -> None:
    assert dist.get_process_group_ranks(registered_for_this_rank) == [ranks.rank]
    whole, local = batch_of(ranks)
    layer = layer_over(registered_for_this_rank, ranks)
    layer(local)
    torch.testing.assert_close(layer.running_mean, 0.1 * whole.mean(0))


@pytest.mark.usefixtures("registered_for_this_rank")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of Dynamo
def test_other_groups_compile_beside_a_group_without_a_name(ranks: Ranks) -> None:
    """Dynamo cannot read torch's registry then. A graph outlives groups that are made later, and its own made anew."""
    everyone = range(ranks.size)
    layer, x = layer_over(dist.new_group(everyone), ranks), batch_of(ranks)[1]
    expected, graphs = copy.deepcopy(layer)(x), CompileCounter()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    dist.new_group(everyone)
    compiled(x)
    assert graphs.frame_count == 1
    torch._dynamo.reset()
    dist.destroy_process_group(layer.process_group)
    torch.testing.assert_close(compiled(x), expected)  # over the other group of these ranks


def test_a_backend_in_python_makes_a_group_like_any_other(ranks: Ranks) -> None:
    """torch's registry has its ranks and its name, which the group itself may not know."""
    name = f"in-python-{id(ranks)}"
    dist.Backend.register_backend(name, InPython, devices=[ranks.device.type])
    group = dist.new_group(backend=name)
    whole, local = batch_of(ranks)
    layer = layer_over(group, ranks)
    layer(local)
    torch.testing.assert_close(layer.running_mean, 0.1 * whole.mean(0))
    (row,) = syncbn.summary(layer)
    assert row.group_size == ranks.size
    assert "name no rank" not in row.last_step
    if ranks.device.type == "cpu":  # a GPU's total is not read
        words = "expected 3 channels" if ranks.rank == 1 else "rank 1: .*expected 3 channels"
        with pytest.raises(ValueError, match=words):
            layer(local[:, :2] if ranks.rank == 1 else local)
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded._process_group.ranks == tuple(range(ranks.size))
    dist.distributed_c10d._world.pg_map.pop(group)  # destroy_process_group asks for its name


def test_the_backward_function_needs_no_forward(ranks: Ranks, recwarn: pytest.WarningsRecorder) -> None:
    x = batch_of(ranks)[1].detach()
    mean, invstd = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    of_group, of_all = (
        syncbn.functional.batch_norm_backward(x, x, mean, invstd, process_group=group) for group in (UsersGroup(), None)
    )
    torch.testing.assert_close(of_group, of_all)
    assert not recwarn.list


def test_statistics_are_not_recomputed_over_other_ranks(ranks: Ranks) -> None:
    layer, x = layer_over(UsersGroup(), ranks), batch_of(ranks)[1]
    with pytest.raises(ValueError, match=r"recompute_running_stats.* need a group that it made"):
        syncbn.recompute_running_stats(layer, [x])
