"""DTensors: sums over exactly the dims of the mesh that shard batch or space, equal to the unsharded input's."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_norm_many

TORCH_211 = torch.__version__.startswith("2.11")  # whose autograd replicates the gradient of an uneven shard to copy it

# of 5 images of 4 channels and 3 x 6 pixels: uneven shards on 2 ranks, and an empty one on 4
SHAPE = (5, 4, 3, 6)
OF_BATCH = (Shard(0), Shard(2), Shard(3))


def numbers(seed: int, ranks: Ranks) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(ranks.device)


def require_divisor(ranks: Ranks) -> None:
    """For tests that share 4 channels or images, or 2 rows of ranks, evenly."""
    if 4 % ranks.size:
        pytest.skip("for 1, 2 or 4 ranks")


def mesh_of(ranks: Ranks, *sizes: int) -> DeviceMesh:
    return init_device_mesh(ranks.device.type, sizes or (ranks.size,))


def new_layer(ranks: Ranks, **options: object) -> syncbn.SyncBatchNorm:
    layer = syncbn.SyncBatchNorm(4, dtype=torch.float64, device=ranks.device, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 0.5, -2.0, 3.0]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.1]))
    return layer


def placed(layer: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """The parameters and buffers of the layer as DTensors, as a sharded or replicated model has them."""

    def place(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, given in [*module.named_parameters(), *module.named_buffers()]:
            its = placements if given.ndim else (Replicate(),) * mesh.ndim
            new = distribute_tensor(given.detach(), mesh, its)
            setattr(module, name, nn.Parameter(new) if isinstance(given, nn.Parameter) else new)

    distribute_module(layer, mesh, place)


def results(layer: nn.Module, x: Tensor, z: Tensor, dy: Tensor) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Of a step and an evaluation; and how many collectives each has."""
    x, z = (one.detach().requires_grad_() for one in (x, z))
    with CommDebugMode() as training:
        output = layer(x, z)
        output.backward(dy)
    with CommDebugMode() as evaluation:
        evaluated = layer.eval()(x, z)
    found = {"output": output, "evaluated": evaluated, "x": x.grad, "z": z.grad, **dict(layer.named_buffers())}
    found |= {"weight": layer.weight.grad, "bias": layer.bias.grad}
    return found, (training.get_total_counts(), evaluation.get_total_counts())


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


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("placement", [*OF_BATCH, Replicate()], ids=repr)
def test_one_dim(ranks: Ranks, placement: Placement, distributed: bool) -> None:
    num_all_reduces = 0 if placement == Replicate() or ranks.size == 1 else 2
    require_equal(ranks, mesh_of(ranks), (placement,), distributed, num_all_reduces)


def test_shards_of_channels(ranks: Ranks) -> None:
    """Each rank normalises its own channels, on 3 ranks one of them none, and nothing is sent."""
    require_equal(ranks, mesh_of(ranks), (Shard(1),), distributed=True, num_all_reduces=0)


def test_a_rank_without_channels(ranks: Ranks) -> None:
    """The last; in training, and in evaluation without running statistics, which normalises this batch too."""
    x, mesh = numbers(0, ranks).repeat(1, ranks.size, 1, 1)[:, : ranks.size - 1], mesh_of(ranks)
    if ranks.size == 1:
        pytest.skip("there would be no channels at all")
    layer = syncbn.SyncBatchNorm(ranks.size - 1, affine=False, track_running_stats=False)
    expected = torch.nn.functional.batch_norm(x, None, None, training=True)
    for training in (True, False):
        output = layer.train(training)(distribute_tensor(x, mesh, [Shard(1)]))
        torch.testing.assert_close(output.full_tensor(), expected)


@pytest.mark.parametrize("placements", list(itertools.product((Shard(0), Shard(3), Shard(1), Replicate()), repeat=2)))
def test_two_dims(ranks: Ranks, placements: tuple[Placement, Placement]) -> None:
    require_divisor(ranks)
    for sizes in {(ranks.size, 1), (1, ranks.size), (2, ranks.size // 2)} if ranks.size > 1 else {(1, 1)}:
        adds_up = any(one in OF_BATCH and size > 1 for one, size in zip(placements, sizes, strict=True))
        require_equal(ranks, mesh_of(ranks, *sizes), placements, True, 2 * adds_up)


def test_a_model_and_its_optimizer(ranks: Ranks) -> None:
    """Converted and then distributed; the average of all batches."""
    require_divisor(ranks)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm2d(4, momentum=None)).to(ranks.device, torch.float64)
    for parameter in plain.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    model = syncbn.convert_syncbn_model(copy.deepcopy(plain))
    mesh = mesh_of(ranks)
    distribute_module(model, mesh)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for seed in range(3):
        x = numbers(seed, ranks)[:4]  # nn.Linear refuses uneven shards
        inputs = (distribute_tensor(x, mesh, [Shard(0)]), x)
        for one, its, optimizer in zip((model, plain), inputs, optimizers, strict=True):
            optimizer.zero_grad()
            one(its).pow(3).mean().backward()
            optimizer.step()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), expected)


@pytest.mark.parametrize("training", [True, False])
def test_function(ranks: Ranks, training: bool) -> None:
    """Of one image a rank, of which the first does not count."""
    x = numbers(0, ranks).repeat(ranks.size, 1, 1, 1)[: ranks.size]
    mask = torch.arange(ranks.size, device=ranks.device) > 0
    stats = x.new_zeros(4), x.new_ones(4)
    expected = sync_batch_norm(x, *map(torch.clone, stats), training=training, mask=mask, process_group=1)
    sharded, own = distribute_tensor(x, mesh_of(ranks), [Shard(0)]), mask[ranks.rank, None]
    output = sync_batch_norm(sharded, *stats, training=training, mask=own)
    torch.testing.assert_close(output.full_tensor(), expected)


@pytest.mark.parametrize("training", [True, False])
def test_several_inputs(ranks: Ranks, training: bool) -> None:
    """As single ones, with one all_reduce; those of one call lie on the same ranks."""
    mesh, x = mesh_of(ranks), numbers(0, ranks)
    inputs = [distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x + 1, mesh, [Shard(2)])]
    means, variances = ([x.new_full((4,), one) for _ in range(2)] for one in (0, 1))
    expected = [
        sync_batch_norm(one, mean.clone(), var.clone(), training=training)
        for one, mean, var in zip(inputs, means, variances, strict=True)
    ]
    with CommDebugMode() as communication:
        outputs = sync_batch_norm_many(inputs, means, variances, training=training)
    assert communication.get_total_counts() == (training and ranks.size > 1)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.placements == wanted.placements
        # In another place of the payload gloo adds the ranks in another order.
        torch.testing.assert_close(output.to_local(), wanted.to_local(), rtol=1e-12, atol=1e-12)
    if training and ranks.size > 1:
        for other in (distribute_tensor(x, mesh, [Replicate()]), x):
            with pytest.raises(
                ValueError, match=r"inputs\[1\]: the batches.*different ranks.*sync_batch_norm for each"
            ):
                sync_batch_norm_many([inputs[0], other], means, variances)


def test_refused_where_plain_tensors_are_expected(ranks: Ranks) -> None:
    mesh, x = mesh_of(ranks), numbers(0, ranks)
    mean, invstd = x.new_zeros(4), x.new_ones(4)

    def replicated(plain: Tensor) -> DTensor:
        return distribute_tensor(plain, mesh, [Replicate()])

    batch_norm_backward(x, x, mean, invstd)
    for name, refused in (
        ("input", lambda: batch_norm_backward(x, replicated(x), mean, invstd)),
        ("grad_output", lambda: batch_norm_backward(replicated(x), x, mean, invstd)),
        ("mean", lambda: batch_norm_backward(x, x, replicated(mean), invstd)),
        ("z", lambda: sync_batch_norm(x, mean, invstd, training=True, z=replicated(x))),
        ("weight", lambda: sync_batch_norm(x, mean, invstd, nn.Parameter(replicated(mean)), training=True)),
    ):
        with pytest.raises(TypeError, match=rf"{name} is a DTensor.*pass {name}.to_local\(\)"):
            refused()


@pytest.mark.parametrize("of_gradient", [Shard(2), Replicate()], ids=repr)
def test_second_derivative(ranks: Ranks, of_gradient: Placement) -> None:
    """Also through a gradient that is placed otherwise: from_local's backward alone would lose its graph."""
    mesh = mesh_of(ranks)

    def second_derivative(process_group: int | None, x: Tensor, placed: Callable[[Tensor], Tensor]) -> Tensor:
        y = new_layer(ranks, process_group=process_group)(x)
        (gradient,) = torch.autograd.grad(y, x, placed(y), create_graph=True)
        (gradient * gradient.detach()).sum().backward()
        return x.grad

    x = numbers(0, ranks)
    expected = second_derivative(1, x.clone().requires_grad_(), torch.square)
    sharded = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    if TORCH_211:
        with pytest.raises(RuntimeError, match="leave out create_graph"):
            second_derivative(None, sharded, torch.square)
        return
    actual = second_derivative(None, sharded, lambda y: y.redistribute(placements=[of_gradient]).square())
    torch.testing.assert_close(actual.full_tensor(), expected)


def test_process_group(ranks: Ranks) -> None:
    """It may say what the mesh says, and nothing else."""
    if ranks.size == 1:
        pytest.skip("all groups are one rank")
    mesh, x = mesh_of(ranks), numbers(0, ranks)
    for same in (mesh, torch.distributed.group.WORLD, ranks.size):
        new_layer(ranks, process_group=same)(distribute_tensor(x, mesh, [Shard(0)]))
    new_layer(ranks, process_group=1)(distribute_tensor(x, mesh, [Replicate()]))
    for other, placement in ((1, Shard(0)), (mesh, Replicate()), (mesh, Shard(1))):
        layer = syncbn.SyncBatchNorm(4, affine=False, track_running_stats=False, process_group=other)
        with pytest.raises(
            ValueError, match=r"process_group is ranks .*, but the batch of the input.*process_group=None"
        ):
            layer(distribute_tensor(x, mesh, [placement]))


def test_placements_that_do_not_fit(ranks: Ranks) -> None:
    if ranks.size == 1:
        pytest.skip("all placements are the same")
    mesh, x = mesh_of(ranks), numbers(0, ranks)
    layer = new_layer(ranks)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"not added up yet.*redistribute"):
        layer(DTensor.from_local(x, mesh, [Partial()]))
    with pytest.raises(ValueError, match=r"expected z to have \(Shard\(dim=0\),\) there, got \(Shard\(dim=2\),\)"):
        layer(sharded, distribute_tensor(x, mesh, [Shard(2)]))
    layer(sharded, sharded)
    with pytest.raises(ValueError, match=r"pass mask.to_local\(\)"):
        layer(sharded, mask=distribute_tensor(x[:, 0] > 0, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"channels are sharded.*distribute_tensor\(running_mean, "):
        layer(distribute_tensor(x, mesh, [Shard(1)]))
    placed(layer, mesh, (Replicate(),))
    with pytest.raises(ValueError, match=r"expected running_mean to have \(Shard\(dim=0\),\) there"):
        layer(distribute_tensor(x, mesh, [Shard(1)]))


@pytest.mark.compiles
@pytest.mark.parametrize("distributed", [True, False])
def test_one_graph(ranks: Ranks, distributed: bool) -> None:
    mesh, x = mesh_of(ranks), numbers(0, ranks)
    layer, expected = new_layer(ranks), new_layer(ranks, process_group=1)(x)
    if distributed:
        placed(layer, mesh, (Replicate(),))
    sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    output = torch.compile(layer, fullgraph=True, backend="aot_eager")(sharded)
    output.sum().backward()
    torch.testing.assert_close(output.full_tensor(), expected)
    assert sharded.grad.placements == (Shard(0),)
