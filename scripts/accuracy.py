"""Print the errors of one training step on inputs where batch norm's formulas lose digits, against a float64 oracle.

    python scripts/accuracy.py

syncbn sums x and x^2 in float64. Beside it: the same formula with float32 sums, E[x^2] - mean^2, which other libraries
use; and F.batch_norm.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from accuracy_cases import HARD_INPUTS, errors_of_one_step

from syncbn.functional import sync_batch_norm


def float32_sums(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor, **_: bool
) -> Tensor:
    """var = E[x^2] - mean^2 in the input's own dtype."""
    dims, num_values = (0, 2, 3), x.numel() // x.shape[1]
    mean = x.sum(dims, keepdim=True) / num_values
    var = x.square().sum(dims, keepdim=True) / num_values - mean.square()
    with torch.no_grad():
        running_mean.lerp_(mean.flatten(), 0.1)
        running_var.lerp_(var.flatten() * num_values / (num_values - 1), 0.1)
    invstd = (var.clamp(min=0) + 1e-5).rsqrt()
    return (x - mean) * (invstd * weight.view(-1, 1, 1)) + bias.view(-1, 1, 1)


FORMULAS = {"syncbn": sync_batch_norm, "E[x^2] - mean^2": float32_sums, "F.batch_norm": F.batch_norm}
NAMES = ("output", "grad_input", "grad_weight", "grad_bias", "running_mean", "running_var")

torch.set_num_threads(1)
for dtype in (torch.float32, torch.float64):
    print(f"\n{dtype}, max |a - b| / max |b| against float64 of the same input (torch {torch.__version__})")
    print(f"{'input':<20}{'formula':<18}" + "".join(f"{name:>14}" for name in NAMES))
    for case in HARD_INPUTS:
        for formula, function in FORMULAS.items():
            relative = errors_of_one_step(case, dtype, function).relative
            print(f"{case:<20}{formula:<18}" + "".join(f"{relative[name]:>14.1e}" for name in NAMES))
