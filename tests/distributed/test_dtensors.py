"""Catches a DTensor whose sums go over other ranks than those that shard batch or space, or a misplaced output."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from training import unchanged
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats

TORCH_211 = torch.__version__.startswith("2.11")  # whose autograd replicates the gradient of an uneven shard to copy it

# of 5 images of 4 channels and 3 x 6 pixels: uneven shards on 2 ranks, and an empty one on 4
SHAPE = (5, 4, 3, 6)
OF_BATCH = (Shard(0), Shard(2), Shard(3))


def numbers(seed: int, ranks: Ranks) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(ranks.device)


def mesh_of(ranks: Ranks, *sizes: int) -> DeviceMesh:
    return init_device_mesh(ranks.device.type, sizes or (ranks.size,))


def spread(tensor: Tensor, placement: Placement, ranks: Ranks) -> DTensor:
    """Over all ranks."""
    return distribute_tensor(tensor, mesh_of(ranks), [placement])


def new_layer(ranks: Ranks, **options: object) -> syncbn.SyncBatchNorm:
    layer = syncbn.SyncBatchNorm(4, dtype=torch.float64, device=ranks.device, **options)
    layer.weight.data.copy_(torch.tensor([1.0, 0.5, -2.0, 3.0]))
    layer.bias.data.copy_(torch.tensor([0.0, 1.0, -1.0, 0.1]))
    return layer


def placed(layer: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """The parameters and buffers of the layer as DTensors, as a sharded or replicated model has them."""
    for name, given in [*layer.named_parameters(), *layer.named_buffers()]:
        new = distribute_tensor(given.detach(), mesh, placements if given.ndim else (Replicate(),) * mesh.ndim)
        setattr(layer, name, nn.Parameter(new) if isinstance(given, nn.Parameter) else new)


def results(layer: nn.Module, x: Tensor, z: Tensor, dy: Tensor) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Of a step and an evaluation; and how many collectives each has."""
    x, z = (one.detach().requires_grad_() for one in (x, z))
    with CommDebugMode() as training:
        output = layer(x, z)
        output.backward(dy)
    with CommDebugMode() as evaluation:
        evaluated = layer.eval()(x, z)
    tensors = {"output": output, "evaluated": evaluated, "x": x.grad, "z": z.grad, **dict(layer.named_buffers())}
    tensors |= {"weight": layer.weight.grad, "bias": layer.bias.grad}
    return tensors, (training.get_total_counts(), evaluation.get_total_counts())


def require_equal(
    ranks: Ranks, mesh: DeviceMesh, placements: tuple[Placement, ...], distributed: bool, num_all_reduces: int
) -> None:
    """Of a layer, whose parameters are DTensors or not, on a DTensor with a residual."""
    given = [numbers(seed, ranks) for seed in range(3)]
    expected, _ = results(new_layer(ranks, fuse_relu=True, process_group=1), *given)
    layer = new_layer(ranks, fuse_relu=True)
    if distributed:
        placed(layer, mesh, tuple(Shard(0) if one == Shard(1) else Replicate() for one in placements))
    actual, collectives = results(layer, *(distribute_tensor(one, mesh, placements) for one in given))
    assert actual["output"].placements == actual["evaluated"].placements == placements
    assert collectives[1] == 0
    if not TORCH_211:
        assert collectives[0] == num_all_reduces
        assert actual["x"].placements == placements
    for name, whole in expected.items():
        one = actual[name]
        if isinstance(one, DTensor):
            one = one.full_tensor()
        elif name in ("weight", "bias") and num_all_reduces:  # this rank's share
            one = ranks.total(one)
        torch.testing.assert_close(one, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("placement", "distributed"),
    [
        *itertools.product((*OF_BATCH, Replicate()), (True, False)),
        (Shard(1), True),  # each rank normalises its own channels, on 3 ranks one of them none
    ],
    ids=repr,
)
def test_one_dim(ranks: Ranks, placement: Placement, distributed: bool) -> None:
    require_equal(ranks, mesh_of(ranks), (placement,), distributed, 2 if placement in OF_BATCH else 0)


def test_a_rank_without_channels(ranks: Ranks) -> None:
    """The last; in training, and in evaluation without running statistics, which normalises this batch too."""
    x = numbers(0, ranks).repeat(1, ranks.size, 1, 1)[:, : ranks.size - 1]
    layer = syncbn.SyncBatchNorm(ranks.size - 1, affine=False, track_running_stats=False)
    for training in (True, False):
        output = layer.train(training)(spread(x, Shard(1), ranks)).full_tensor()
        torch.testing.assert_close(output, torch.nn.functional.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("placements", list(itertools.product((Shard(0), Shard(3), Shard(1), Replicate()), repeat=2)))
def test_two_dims(ranks: Ranks, placements: tuple[Placement, Placement]) -> None:
    if ranks.size % 2:
        pytest.skip("needs 2 rows of ranks")
    for sizes in {(ranks.size, 1), (1, ranks.size), (2, ranks.size // 2)}:
        adds_up = any(one in OF_BATCH and size > 1 for one, size in zip(placements, sizes, strict=True))
        require_equal(ranks, mesh_of(ranks, *sizes), placements, True, 2 * adds_up)


def test_a_model_and_its_optimizer(ranks: Ranks) -> None:
    """Converted and then distributed; the average of all batches."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm2d(4, momentum=None)).to(ranks.device, torch.float64)
    for parameter in plain.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    model = syncbn.convert_syncbn_model(copy.deepcopy(plain))
    distribute_module(model, mesh_of(ranks))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for seed in range(3):
        x = numbers(seed, ranks).repeat(ranks.size, 1, 1, 1)  # nn.Linear refuses uneven shards
        for one, its, optimizer in zip((model, plain), (spread(x, Shard(0), ranks), x), optimizers, strict=True):
            optimizer.zero_grad()
            one(its).pow(3).mean().backward()
            optimizer.step()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), expected)


@pytest.mark.parametrize("training", [True, False])
def test_the_gradient_of_a_residual_is_not_the_memory_of_another_tensor(ranks: Ranks, training: bool) -> None:
    """To z.grad autograd adds in place."""
    x, z, w, dy = (spread(numbers(seed, ranks), Shard(0), ranks).requires_grad_(seed < 3) for seed in range(4))
    y = new_layer(ranks).train(training)(x, z) + w
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    for actual, expected in (dy, 1), (z.grad, 2), (w.grad, 2):
        assert torch.equal(actual.to_local(), expected * spread(numbers(3, ranks), Shard(0), ranks).to_local())


@pytest.mark.parametrize("training", [True, False])
def test_function(ranks: Ranks, training: bool) -> None:
    """Of one image a rank, of which the first does not count."""
    x = numbers(0, ranks).repeat(ranks.size, 1, 1, 1)[: ranks.size]
    mask = torch.arange(ranks.size, device=ranks.device) > 0
    stats = x.new_zeros(4), x.new_ones(4)
    expected = sync_batch_norm(x, *map(torch.clone, stats), training=training, mask=mask, process_group=1)
    sharded, own = spread(x, Shard(0), ranks), mask[ranks.rank, None]
    output = sync_batch_norm(sharded, *stats, training=training, mask=own)
    torch.testing.assert_close(output.full_tensor(), expected)


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    mesh, x, layer, placed_layer = mesh_of(ranks), numbers(0, ranks), new_layer(ranks), new_layer(ranks)
    placed(placed_layer, mesh, (Replicate(),))
    shards, replicated = [spread(x, Shard(dim), ranks) for dim in range(3)], spread(x, Replicate(), ranks)
    mean, invstd = x.new_zeros(4), x.new_ones(4)

    def over(process_group: object, x: Tensor) -> Tensor:
        return sync_batch_norm(x, None, None, training=True, process_group=process_group)

    layer(shards[0], shards[0])
    batch_norm_backward(x, x, mean, invstd)
    for same in (mesh, torch.distributed.group.WORLD, ranks.size):  # as the mesh says
        over(same, shards[0])
    over(1, replicated)
    other = r"process_group is ranks .*, but the batch of the input.*process_group=None"
    other_z = r"expected z to have \(Shard\(dim=0\),\) there, got \(Shard\(dim=2\),\)"
    plain = r"{0} is a DTensor.*pass {0}.to_local\(\)".format
    for message, refused in (
        (other, lambda: over(1, shards[0])),
        (other, lambda: over(mesh, replicated)),
        (r"not added up yet.*redistribute", lambda: layer(DTensor.from_local(x, mesh, [Partial()]))),
        (other_z, lambda: layer(shards[0], shards[2])),
        (r"pass mask.to_local\(\)", lambda: layer(shards[0], mask=shards[0][:, 0] > 0)),
        (r"channels are sharded.*distribute_tensor\(running_mean, ", lambda: layer(shards[1])),
        (r"expected running_mean to have \(Shard\(dim=0\),\) there", lambda: placed_layer(shards[1])),
        (plain("input"), lambda: batch_norm_backward(x, replicated, mean, invstd)),
        (plain("z"), lambda: sync_batch_norm(x, mean, invstd, training=True, z=replicated)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            refused()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
def test_what_does_not_fit_on_one_rank_is_refused_on_all(ranks: Ranks) -> None:
    """Each of these is found before the plain tensors are there that other faults are found in."""
    mesh, x, layer = mesh_of(ranks), numbers(0, ranks), new_layer(ranks)
    good, partial, first = spread(x, Shard(0), ranks), DTensor.from_local(x, mesh, [Partial()]), ranks.rank == 0
    alone, *_ = [torch.distributed.new_group([rank]) for rank in range(ranks.size)]
    for message, call in (
        ("not added up yet", lambda: layer(partial if first else good)),
        ("not added up yet", lambda: sync_batch_stats(partial if first else good)),
        ("expected z to have", lambda: layer(good, partial if first else good)),
        (r"pass mask.to_local\(\)", lambda: layer(good, mask=good[:, 0] > 0 if first else None)),
        ("process_group is ranks", lambda: sync_batch_norm(
            good, None, None, training=True, process_group=alone if first else None
        )),
        ("channel_dim=7 does not exist in an input of shape", lambda: sync_batch_norm(
            good, layer.running_mean, layer.running_var, training=True, channel_dim=7 if first else 1
        )),
    ):  # fmt: skip
        with (
            unchanged(layer),
            pytest.raises(ValueError, match=message if first else f"rank 0: ValueError: .*{message}"),
        ):
            call()
    layer(good)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
def test_a_faulty_rank_sends_as_many_channels_as_the_others_have(ranks: Ranks) -> None:
    """Each half of the channels lies on two ranks, and the fault is found while the tensors are DTensors."""
    if ranks.size != 4:
        pytest.skip("needs a mesh of 2 x 2")
    mesh, x, layer = mesh_of(ranks, 2, 2), numbers(0, ranks), new_layer(ranks)
    placed(layer, mesh, (Replicate(), Shard(0)))
    good, bad = (distribute_tensor(x, mesh, [Shard(0), placement]) for placement in (Shard(1), Replicate()))
    if ranks.rank in (0, 2):  # of the first half
        message = "expected z to have" if ranks.rank == 0 else "rank 0: ValueError: .*expected z to have"
        with pytest.raises(ValueError, match=message):
            layer(good, bad if ranks.rank == 0 else good)
        assert not layer.running_mean.to_local().any()
    else:
        layer(good, good)


@pytest.mark.parametrize("placement", [Shard(2), Replicate()], ids=repr)
def test_second_derivative(ranks: Ranks, placement: Placement) -> None:
    """Also through a gradient that is placed otherwise: from_local's backward alone would lose its graph."""

    def second_derivative(process_group: int | None, x: Tensor, placed: Callable[[Tensor], Tensor]) -> Tensor:
        y = new_layer(ranks, process_group=process_group)(x)
        (gradient,) = torch.autograd.grad(y, x, placed(y), create_graph=True)
        (gradient * gradient.detach()).sum().backward()
        return x.grad

    x = numbers(0, ranks)
    expected = second_derivative(1, x.clone().requires_grad_(), torch.square)
    sharded = spread(x, Shard(2), ranks).requires_grad_()
    if TORCH_211:
        with pytest.raises(RuntimeError, match="leave out create_graph"):
            second_derivative(None, sharded, torch.square)
        return
    actual = second_derivative(None, sharded, lambda y: y.redistribute(placements=[placement]).square())
    torch.testing.assert_close(actual.full_tensor(), expected)


@pytest.mark.compiles
@pytest.mark.parametrize("distributed", [True, False])
def test_one_graph(ranks: Ranks, distributed: bool) -> None:
    x, layer = numbers(0, ranks), new_layer(ranks)
    expected = new_layer(ranks, process_group=1)(x)
    if distributed:
        placed(layer, mesh_of(ranks), (Replicate(),))
    sharded = spread(x, Shard(0), ranks).requires_grad_()
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(sharded)
    output.sum().backward()
    torch.testing.assert_close(output.full_tensor(), expected)
    assert sharded.grad.placements == (Shard(0),)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 0, 1)], ids=["NCHW", "channels last", "HWNC"])
def test_strides_are_those_of_batch_norm(ranks: Ranks, order: tuple[int, ...]) -> None:
    """Of the whole output, which a DTensor keeps beside the local one."""
    back = [order.index(dim) for dim in range(4)]
    x = numbers(0, ranks).permute(order).contiguous().permute(back)
    y = new_layer(ranks)(DTensor.from_local(x, mesh_of(ranks), [Shard(0)]))
    assert y.stride() == y.to_local().stride() == nn.functional.batch_norm(x, None, None, training=True).stride()
