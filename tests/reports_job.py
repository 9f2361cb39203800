"""Runs programs of tests/reports/ that need ranks, one after another: their files are the arguments."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    for file in sys.argv[1:]:
        if dist.get_rank() == 0:
            print(f"== {Path(file).stem}", flush=True)
        runpy.run_path(file)["main"]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
