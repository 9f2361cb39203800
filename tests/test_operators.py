"""Tests the operators of the C++ kernels: torch's checks of operators, any strides, and errors for other tensors."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import payload
from syncbn.kernels import cpu

if reason := cpu.load():
    pytest.skip(reason, allow_module_level=True)

from syncbn.kernels import operators

X, ONES = torch.randn(4, 3, 5), torch.ones(3)
SUMS, STATISTICS = torch.ones(payload.num_elements(3), dtype=torch.float64), torch.ones(3 * 3 + 4, dtype=torch.float64)
CALLS = {
    "forward_sums": (X, 1),
    "forward_outputs": (X, 1, SUMS, ONES, ONES, X, 1e-5, True),
    "backward_sums": (X, X, X, 1, STATISTICS, True, torch.float32, None),
    "backward_outputs": (X, X, X, 1, SUMS.clone(), STATISTICS, ONES, True, True),
}
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "channels innermost": lambda x: x.mT.contiguous().mT,
    "channels outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "another order": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "the reverse order": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "not dense": lambda x: torch.stack((x, x), dim=-1)[..., 0],
    "padded rows": lambda x: F.pad(x.mT, (0, 1))[..., :-1].mT,
    "overlapping": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck_and_refuse_other_dtypes_and_sizes(name: str) -> None:
    operator, good = getattr(operators, name), CALLS[name]
    torch.library.opcheck(operator, good)
    for index, argument in enumerate(good):
        if isinstance(argument, Tensor):
            other_size = torch.cat((argument, argument))
            for bad in (argument.to(torch.int32), *([other_size] if name != "forward_sums" else [])):
                with pytest.raises(RuntimeError, match="expected"):
                    operator(*good[:index], bad, *good[index + 1 :])


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)
def test_operators_take_any_strides_and_return_those_of_the_input(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Inductor may pass any strides in each input. If x is not dense, outputs have the strides of a dense copy."""
    operator, inputs = getattr(operators, name), [i for i, argument in enumerate(CALLS[name]) if argument is X]
    for changed in (inputs, *([index] for index in inputs)):
        arguments = tuple(change(X) if i in changed else argument for i, argument in enumerate(CALLS[name]))
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")  # compares strides of outputs
        contiguous = (a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        torch.testing.assert_close(operator(*arguments), operator(*contiguous))
