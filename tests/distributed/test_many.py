"""Several inputs, one all_reduce each way: equal to as many separate calls."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from voting import Ranks

from syncbn.functional import sync_batch_norm, sync_batch_norm_many

CHANNELS = (3, 1, 4, 3, 2)  # of five pyramid levels
SHAPES = ((2, 3, 8, 8), (2, 1, 4, 4), (0, 4, 2, 2), (5, 3), (2, 2, 1, 3))


class Levels:
    """Five inputs of one rank with their parameters and buffers."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(ranks.rank)

        def draw(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype).to(ranks.device)

        self.inputs = [draw(shape).requires_grad_() for shape in SHAPES]
        self.inputs[0] = draw(SHAPES[0]).to(memory_format=torch.channels_last).requires_grad_()
        self.grads = [draw(shape) for shape in SHAPES]
        torch.manual_seed(0)  # parameters are the same on all ranks
        self.weights = [torch.randn(num, device=ranks.device).requires_grad_() for num in CHANNELS]
        self.biases = [torch.randn(num, device=ranks.device).requires_grad_() for num in CHANNELS]
        self.weights[1] = self.biases[2] = None
        self.means = [torch.zeros(num, device=ranks.device) for num in CHANNELS]
        self.variances = [torch.ones(num, device=ranks.device) for num in CHANNELS]
        self.means[3] = self.variances[3] = None
        self.options: dict[str, object] = {"momentum": 0.2}

    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (*self.inputs, *self.weights, *self.biases) if leaf is not None]

    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in (*self.means, *self.variances) if buffer is not None]

    def together(self, **options: object) -> list[Tensor]:
        lists = self.inputs, self.means, self.variances, self.weights, self.biases
        return sync_batch_norm_many(*lists, **self.options, **options)

    def apart(self, training: bool = True) -> list[Tensor]:
        of_each = zip(self.inputs, self.means, self.variances, self.weights, self.biases, strict=True)
        return [sync_batch_norm(*one, training=training, **self.options) for one in of_each]


def check_equal(ranks: Ranks, actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit on two ranks; with more, gloo's order of summing depends on the place in the payload."""
    tolerance = {"rtol": 0, "atol": 0} if ranks.size == 2 else {}
    torch.testing.assert_close(actual, expected, check_stride=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_separate_calls(ranks: Ranks, dtype: torch.dtype) -> None:
    one, other = Levels(ranks, dtype), Levels(ranks, dtype)
    with CommDebugMode() as forward:
        together = one.together()
    apart = other.apart()
    check_equal(ranks, together, apart)
    check_equal(ranks, one.buffers(), other.buffers())
    with CommDebugMode() as backward:
        gradients = torch.autograd.grad(together, one.leaves(), one.grads)
    check_equal(ranks, gradients, torch.autograd.grad(apart, other.leaves(), other.grads))
    assert (forward.get_total_counts(), backward.get_total_counts()) == (1, 1)


def test_an_output_that_no_loss_uses(ranks: Ranks) -> None:
    """Its gradient is zero, and the others wait for no one."""
    one, other = Levels(ranks), Levels(ranks)
    used = ranks.rank % len(CHANNELS)
    one.together()[used].backward(one.grads[used])
    unused = [grad if index == used else torch.zeros_like(grad) for index, grad in enumerate(other.grads)]
    torch.autograd.backward(other.apart(), unused)
    check_equal(ranks, [leaf.grad for leaf in one.leaves()], [leaf.grad for leaf in other.leaves()])


def test_evaluation(ranks: Ranks) -> None:
    one = Levels(ranks)
    one.means[3], one.variances[3] = torch.ones(2, 3, device=ranks.device)
    with CommDebugMode() as mode:
        check_equal(ranks, one.together(training=False), one.apart(training=False))
    assert mode.get_total_counts() == 0
    with pytest.raises(ValueError, match=r"inputs\[0\]: running_mean must be defined in evaluation mode"):
        sync_batch_norm_many(one.inputs, training=False)


def test_second_derivative(ranks: Ranks) -> None:
    results = []
    for name in ("together", "apart"):
        levels = Levels(ranks)
        outputs = getattr(levels, name)()
        with CommDebugMode() as mode:
            first = torch.autograd.grad(sum(y.pow(3).sum() for y in outputs), levels.leaves(), create_graph=True)
        assert mode.get_total_counts() == 2 * (len(SHAPES) if name == "apart" else 1)
        penalty = sum(gradient.square().sum() for gradient in first[: len(SHAPES)])
        results.append(torch.autograd.grad(penalty, levels.leaves(), allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(*results)


def test_inputs_that_share_their_buffers(ranks: Ranks) -> None:
    """As siamese views do: they are updated by one input after the other, also where a rank has one with gaps."""
    generator = torch.Generator().manual_seed(ranks.rank)
    first, second = torch.randn(2, 4, 3, 6, generator=generator).to(ranks.device)
    mean, var = torch.zeros(3, device=ranks.device), torch.ones(3, device=ranks.device)
    expected = mean.clone(), var.clone()
    for x in (first[:, :, ::2], second):
        sync_batch_norm(x, *expected, training=True)
    with_gaps = first[:, :, ::2] if ranks.rank == 0 else first[:, :, ::2].contiguous()
    sync_batch_norm_many([with_gaps, second], [mean] * 2, [var] * 2)
    assert torch.equal(mean, expected[0])
    assert torch.equal(var, expected[1])


def test_channels_last_dim_and_no_parameters(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(ranks.rank)
    inputs = [torch.randn(2, *shape, generator=generator).to(ranks.device) for shape in ((3, 4), (5,), (2, 2, 6))]
    expected = [sync_batch_norm(x, None, None, training=True, channel_dim=-1) for x in inputs]
    check_equal(ranks, sync_batch_norm_many(inputs, channel_dim=-1), expected)
    assert sync_batch_norm_many([]) == []


@pytest.mark.parametrize(
    ("alone", "name", "index", "value", "message"),
    [
        (False, "weights", 1, torch.ones(7), r"inputs\[1\]: expected weight of shape \(1,\), .* got \(7,\)"),
        (True, "weights", 0, torch.ones(7), r"inputs\[0\]: expected weight of shape \(3,\), .* got \(7,\)"),
        (True, "inputs", 2, torch.ones(0, 4, device="meta"), r"inputs\[2\]: the input is on meta but inputs\[0\] on"),
        (False, "inputs", 3, torch.ones(5, 3).long(), r"inputs\[3\]: expected a float16, .* got torch.int64"),
        (False, "means", slice(4, 5), [], "expected 5 running_means, one for each input, got 4"),
        (False, "options", "momentum", "0.1", r"momentum must be a number, got '0.1'"),
    ],
)
def test_a_fault_on_one_rank_is_raised_on_all(
    ranks: Ranks, alone: bool, name: str, index: object, value: object, message: str
) -> None:
    """Where inputs stand `alone`, they alone say how many channels they have."""
    if ranks.device.type != "cpu":
        pytest.skip("would stop the host to read the fault")
    levels, bad = Levels(ranks), ranks.size - 1
    if alone:
        levels.weights[1:] = levels.biases[1:] = levels.means[1:] = levels.variances[1:] = [None] * 4
    if ranks.rank == bad:
        getattr(levels, name)[index] = value
    of_all = f"^{message}" if ranks.rank == bad else rf"rank {bad}: \w+Error: {message}"
    with pytest.raises((TypeError, ValueError), match=of_all):
        levels.together()
    assert not any(mean.any() for mean in levels.means if mean is not None)


def test_what_is_refused(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"running_means to be a list of tensors, got one tensor; use .*unbind"):
        sync_batch_norm_many(Levels(ranks).inputs[:2], torch.zeros(2, 3))
    if ranks.device.type == "cpu":  # else the host would stop to read the count
        inputs = [torch.randn(4, 3), torch.randn(1 if ranks.rank == 0 else 0, 3)]
        with pytest.raises(ValueError, match=r"inputs\[1\]: Expected more than 1 value per channel .* got 1"):
            sync_batch_norm_many(inputs)


@pytest.mark.compiles
def test_compiles(ranks: Ranks) -> None:
    results = []
    for function in (sync_batch_norm_many, torch.compile(sync_batch_norm_many, backend="aot_eager", fullgraph=True)):
        levels = Levels(ranks)
        outputs = function(levels.inputs, levels.means, levels.variances, levels.weights, levels.biases)
        gradients = torch.autograd.grad(outputs, levels.leaves(), levels.grads)
        with torch.no_grad():
            results.append((outputs, gradients, levels.buffers(), function(levels.inputs)))
    torch.testing.assert_close(*results)
