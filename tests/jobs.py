"""Programs that tests start: the examples, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ON_TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def run(*command: object, seconds: float = 100) -> str:
    """What it prints. **Raises** AssertionError with all that it says when it fails, or does not end in time."""
    result = subprocess.run(
        [str(word) for word in command], env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def processes_with(path: Path) -> dict[int, str]:
    """The command lines of the processes that were given `path`; torchrun puts its ranks into sessions of their own."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(path) in command:
            found[int(file.parent.name)] = command
    return found
