"""Print the errors of one training step on inputs for which formulas lose digits, compared with float64.

    python scripts/accuracy.py

Compares three formulas: syncbn, which sums x and x^2 in float64; E[x^2] - mean^2 in the dtype of the input, which other
libraries use; and F.batch_norm.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks.layers import hand_written

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from oracle import HARD_INPUTS, errors_of_one_step

from syncbn.functional import sync_batch_norm

FORMULAS = {"syncbn": sync_batch_norm, "E[x^2] - mean^2": hand_written, "F.batch_norm": F.batch_norm}
NAMES = ("output", "grad_input", "grad_weight", "grad_bias", "running_mean", "running_var")

torch.set_num_threads(1)
for dtype in (torch.float32, torch.float64):
    print(f"\n{dtype}, max |a - b| / max |b| (torch {torch.__version__})")
    print(f"{'input':<20}{'formula':<18}" + "".join(f"{name:>14}" for name in NAMES))
    for case in HARD_INPUTS:
        for formula, function in FORMULAS.items():
            errors = errors_of_one_step(case, dtype, function)
            print(f"{case:<20}{formula:<18}" + "".join(f"{errors[name]:>14.1e}" for name in NAMES))
