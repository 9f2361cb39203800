"""examples/digits.py on several hosts; in its third step the ranks wait until the link between the hosts is cut.

python tests/cut_link_job.py FOLDER examples/digits.py --steps 10

In FOLDER each rank makes a file when it has come so far, and the test the file "cut".
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

from torch import nn

import syncbn

FOLDER = Path(sys.argv[1])
LAYERS_IN_ORDER = 7  # of the model
CALL = 2 * LAYERS_IN_ORDER + 5  # of them all: the fifth of the third step, 4.bn1
UNTIL_WRITTEN_SECONDS = 1.0  # a thread writes a rank's position, soon after it has changed

calls = itertools.count(1)


def wait_for_the_cut(layer: nn.Module, _: object) -> None:
    if isinstance(layer, syncbn.SyncBatchNorm) and layer.training and next(calls) == CALL:
        time.sleep(UNTIL_WRITTEN_SECONDS)
        (FOLDER / f"rank {os.environ['RANK']}").touch()
        while not (FOLDER / "cut").exists():
            time.sleep(0.01)


if __name__ == "__main__":
    nn.modules.module.register_module_forward_pre_hook(wait_for_the_cut)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
