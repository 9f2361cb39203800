"""A fault of one rank is raised on every rank, with the faulty rank's number, and loses nothing."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from voting import Ranks

import syncbn
from syncbn.distributed import groups

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="no rank reads the mark on a GPU: the faulty rank raises alone"
)

GOOD = torch.arange(24.0).view(2, 3, 4)

# A bad first argument, what every rank raises, and what it says. The nearest good argument is GOOD.
FAULTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "channels": (lambda: GOOD.movedim(1, -1), ValueError, r"expected 3 channels in dim 1 of the input, got 4"),
    "dims": (lambda: GOOD[0, 0], ValueError, r"expected at least 2D input \(got 1D input"),
    "integer": (
        lambda: GOOD.int(),
        TypeError,
        "expected a float16, bfloat16, float32 or float64 input, got torch.int32",
    ),
    "complex": (lambda: GOOD.to(torch.complex64), TypeError, "got torch.complex64"),
    "sparse": (lambda: GOOD.to_sparse(), TypeError, "expected a dense input, got layout torch.sparse_coo"),
    "not a tensor": (lambda: GOOD.tolist(), TypeError, "expected a Tensor as input, got list"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("affine", [True, False])
def test_bad_input_on_one_rank(ranks: Ranks, fault: str, affine: bool) -> None:
    make, error, text = FAULTS[fault]
    layer = syncbn.SyncBatchNorm(3, affine=affine, track_running_stats=affine)
    before = copy.deepcopy(layer.state_dict())
    faulty = ranks.size - 1
    with pytest.raises(error, match=rf"^SyncBatchNorm forward, call 1:\nrank {faulty}: .*{text}"):
        layer(make() if ranks.rank == faulty else GOOD)
    for name, buffer in layer.state_dict().items():
        assert torch.equal(buffer, before[name]), name
    layer(GOOD)  # the group goes on
    dist.barrier()


def test_z_of_another_shape(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3)
    layer(GOOD, GOOD)
    with pytest.raises(ValueError, match=r"rank 0: expected z of the input's shape \(2, 3, 4\), got \(2, 3, 1\)"):
        layer(GOOD, GOOD[:, :, :1] if ranks.rank == 0 else GOOD)


@pytest.mark.parametrize("name", ["z", "weight", "running_mean"])
def test_sparse_tensors_beside_the_input(ranks: Ranks, name: str) -> None:
    tensors = {"z": GOOD, "weight": torch.ones(3), "running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    if ranks.rank == 0:
        tensors[name] = tensors[name].to_sparse()
    with pytest.raises(TypeError, match=f"rank 0: expected a dense {name}, got layout torch.sparse_coo; use {name}"):
        syncbn.functional.sync_batch_norm(GOOD, **tensors, training=True)


def test_rank_check_of_the_numbered_layers(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm2d(3)
    with pytest.raises(ValueError, match=r"rank 1: expected 4D input \(got 3D input\)"):
        layer(GOOD if ranks.rank == 1 else GOOD[..., None])


def test_a_rank_check_of_ones_own(ranks: Ranks) -> None:
    """Whatever class of exception it raises."""

    class Own(torch.nn.modules.batchnorm._BatchNorm):
        def _check_input_dim(self, input: Tensor) -> None:
            assert input.ndim == 3, "my own words"

    with pytest.raises(ValueError, match="rank 1: my own words"):
        syncbn.convert_syncbn_model(Own(3))(GOOD[..., None] if ranks.rank == 1 else GOOD)


@pytest.mark.parametrize("channel_dim", [1.0, "1", 3])
def test_channel_dim_that_is_none(ranks: Ranks, channel_dim: object) -> None:
    with pytest.raises((TypeError, ValueError), match="rank 0: channel_dim"):
        syncbn.functional.sync_batch_norm(
            GOOD, None, None, torch.ones(3), training=True, channel_dim=channel_dim if ranks.rank == 0 else 1
        )


def test_the_layer_and_every_faulty_rank_are_named(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3)
    named = (
        rf"^layer '1' forward, call 1:\nranks 0-{ranks.size - 1}: .*expected 3 channels in dim 1 of the input, got 2"
    )
    with pytest.raises(ValueError, match=named):
        nn.Sequential(nn.Identity(), layer)(torch.randn(2, 2))
    with pytest.raises(ValueError, match=r"rank 0: .*got 5.*\nrank 1: .*got 6"):
        layer(torch.randn(2, 5 + ranks.rank))


def test_functional_form_knows_the_channels_from_its_tensors(ranks: Ranks) -> None:
    x = GOOD if ranks.rank else GOOD.movedim(1, -1)
    with pytest.raises(ValueError, match=r"rank 0: .*expected 3 channels in dim 1 of the input, got 4"):
        syncbn.functional.sync_batch_norm(x, None, None, torch.ones(3), training=True)
    with pytest.raises(ValueError, match="rank 0: expected grad_output of the input's shape"):
        syncbn.functional.batch_norm_backward(x, GOOD, torch.zeros(3), torch.ones(3))


def test_a_wrong_vector_is_outvoted(ranks: Ranks) -> None:
    """The faulty rank must join with the others' C: a payload of another length aborts gloo below Python."""
    three, two = torch.ones(3), torch.ones(2)
    wrong = two if ranks.rank == 0 else three
    with pytest.raises(ValueError, match=r"rank 0: .*running_mean should contain 3 elements not 2"):
        syncbn.functional.sync_batch_norm(GOOD, wrong.clone(), three.clone(), training=True)
    with pytest.raises(ValueError, match=r"rank 0: .*mean should contain 3 elements not 2"):
        syncbn.functional.batch_norm_backward(GOOD, GOOD, wrong, three)
    with pytest.raises(TypeError, match="rank 0: expected weight to be a Tensor"):
        syncbn.functional.sync_batch_norm(GOOD, three.clone(), three.clone(), [1.0] if ranks.rank == 0 else three, training=True)  # fmt: skip  # noqa: E501
    with pytest.raises(ValueError, match="rank 0: not enough values to unpack"):
        syncbn.functional.batch_norm_backward(GOOD, GOOD, three, three, output_mask=(True, True) if ranks.rank == 0 else (True, True, True))  # fmt: skip  # noqa: E501
    with pytest.raises(ValueError, match="rank 0: the input is on meta but running_mean on cpu"):
        syncbn.SyncBatchNorm(3)(GOOD.to("meta") if ranks.rank == 0 else GOOD)


def test_the_exchange_does_not_need_numpy(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not depend on NumPy, and its all_gather_object does not work without."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    with pytest.raises(ValueError, match=r"rank 0: .*expected 3 channels"):
        syncbn.SyncBatchNorm(3)(GOOD.mT if ranks.rank == 0 else GOOD)
    with pytest.raises(ValueError, match=f"{ranks.size + 1} ranks|multiple of the group size"):
        groups.make(ranks.size + 1)


def test_one_value_in_the_whole_group(ranks: Ranks) -> None:
    """F.batch_norm's error on every rank, also on those without a value; two values are enough."""
    layer = syncbn.SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    share = 1 if ranks.rank == 0 else 0
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 over all ranks"):
        layer(torch.randn(share, 3))
    for name, buffer in layer.state_dict().items():
        assert torch.equal(buffer, before[name]), name
    layer(torch.randn(2 * share, 3))
    assert layer.num_batches_tracked == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own in Dynamo
@pytest.mark.two_ranks
def test_a_fault_beside_a_compiled_rank(ranks: Ranks) -> None:
    """That rank reads no total and would not take part in an exchange: the faulty one raises its own error at once."""
    if torch.cuda.is_available():
        pytest.skip("no rank reads a total on a GPU")
    torch._dynamo.reset()
    layer, x = (
        syncbn.SyncBatchNorm1d(3, process_group=dist.new_group()),
        torch.ones(4, 3),
    )  # calls are not counted alike
    if ranks.rank:
        torch.compile(layer, backend="eager", fullgraph=True)(x)
        return
    with pytest.raises(ValueError, match="expected 3 channels in dim 1 of the input, got 2"):
        layer(x[:, :2])
