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

    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (*self.inputs, *self.weights, *self.biases) if leaf is not None]

    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in (*self.means, *self.variances) if buffer is not None]

    def together(self, **options: object) -> list[Tensor]:
        return sync_batch_norm_many(
            self.inputs, self.means, self.variances, self.weights, self.biases, **{"momentum": 0.2, **options}
        )

    def apart(self, training: bool = True) -> list[Tensor]:
        of_each = zip(self.inputs, self.means, self.variances, self.weights, self.biases, strict=True)
        return [sync_batch_norm(*one, training=training, momentum=0.2) for one in of_each]


def check_equal(ranks: Ranks, actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit on two ranks; with more, gloo's order of summing depends on the place in the payload."""
    for one, other in zip(actual, expected, strict=True):
        if ranks.size == 2:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype


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
    outputs = other.apart()
    torch.autograd.backward(
        outputs, [grad if index == used else torch.zeros_like(grad) for index, grad in enumerate(other.grads)]
    )
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
        penalty = sum(gradient.square().sum() for gradient in first[: len(SHAPES)])
        results.append((mode.get_total_counts(), torch.autograd.grad(penalty, levels.leaves(), allow_unused=True)))
    assert [count for count, _ in results] == [2, 2 * len(SHAPES)]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_channels_last_dim_and_no_parameters(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(ranks.rank)
    inputs = [torch.randn(2, *shape, generator=generator).to(ranks.device) for shape in ((3, 4), (5,), (2, 2, 6))]
    expected = [sync_batch_norm(x, None, None, training=True, channel_dim=-1) for x in inputs]
    check_equal(ranks, sync_batch_norm_many(inputs, channel_dim=-1), expected)
    assert sync_batch_norm_many([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": 1}, r"inputs\[1\]: .*weight should contain 1 elements not 7"),
        ({"device": 2}, r"inputs\[2\]: the input is on meta but inputs\[0\] on (cpu|cuda:\d); move one"),
        ({"momentum": 1}, r"momentum must be a number, got '0.1'"),
        ({"length": 4}, "expected 5 running_means, one for each input, got 4"),
        ({"without": 0}, r"inputs\[0\]: .*weight should contain 3 elements not 7"),
        ({"inputs": 3}, r"inputs\[3\]: expected a float16, bfloat16, float32 or float64 input, got torch.int64"),
    ],
)
def test_a_fault_on_one_rank_is_raised_on_all(ranks: Ranks, change: dict[str, int], message: str) -> None:
    levels = Levels(ranks)
    bad = ranks.rank == ranks.size - 1
    if ranks.device.type != "cpu" and not bad:
        return
    if bad and "weights" in change:
        levels.weights[1] = torch.ones(7, device=ranks.device)
    elif bad and "device" in change:
        for tensors in (levels.inputs, levels.weights, levels.means, levels.variances):
            tensors[2] = tensors[2].to("meta")
    elif bad and "length" in change:
        levels.means.pop()
    elif "without" in change:  # the other inputs alone say how many channels they have
        levels.weights[1:] = levels.biases[1:] = levels.means[1:] = levels.variances[1:] = [None] * 4
        if bad:
            levels.weights[0] = torch.ones(7, device=ranks.device)
    elif bad and "inputs" in change:
        levels.inputs[3] = torch.ones(SHAPES[3], dtype=torch.int64, device=ranks.device)
    with pytest.raises((TypeError, ValueError), match=rf"rank {ranks.size - 1}: {message}"):
        levels.together(**({"momentum": "0.1"} if bad and "momentum" in change else {}))
    assert all(not mean.any() for mean in levels.means if mean is not None and not mean.is_meta)


def test_one_value_per_channel(ranks: Ranks) -> None:
    if ranks.device.type != "cpu":
        pytest.skip("would stop the host to read the count")
    inputs = [torch.randn(4, 3), torch.randn(1 if ranks.rank == 0 else 0, 3)]
    with pytest.raises(ValueError, match=r"inputs\[1\]: Expected more than 1 value per channel when training, got 1"):
        sync_batch_norm_many(inputs)


def test_lists_of_different_lengths(ranks: Ranks) -> None:
    levels = Levels(ranks)
    levels.weights.pop()
    with pytest.raises(ValueError, match="expected 5 weights, one for each input, got 4"):
        levels.together()
    with pytest.raises(TypeError, match=r"running_means to be a list of tensors, got one tensor; use .*unbind"):
        sync_batch_norm_many(levels.inputs[:2], torch.zeros(2, 3))


@pytest.mark.compiles
def test_compiles(ranks: Ranks) -> None:
    one, other = Levels(ranks), Levels(ranks)
    compiled = torch.compile(sync_batch_norm_many, backend="aot_eager", fullgraph=True)
    actual = compiled(one.inputs, one.means, one.variances, one.weights, one.biases)
    expected = sync_batch_norm_many(other.inputs, other.means, other.variances, other.weights, other.biases)
    torch.testing.assert_close(actual, expected)
    gradients = torch.autograd.grad(actual, one.leaves(), one.grads)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, other.leaves(), other.grads))
    torch.testing.assert_close(one.buffers(), other.buffers())
    with torch.no_grad():
        torch.testing.assert_close(compiled(one.inputs), sync_batch_norm_many(one.inputs))
