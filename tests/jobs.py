"""Start programs for tests: under torchrun, or without it on ranks that start faster.

The programs have no time limit of their own. The `timeout` in pyproject.toml ends a test that hangs.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from starter import Started

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ON_TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def wait_until(happened: Callable[[], object]) -> None:
    """Wait until `happened` returns true. **Raises** AssertionError after two minutes, enough for a busy machine."""
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, "timed out after two minutes"
        time.sleep(0.02)


def run(*command: object, folder: Path | None = None, **environment: str) -> str:
    """Run a command in a folder and return its output. **Raises** AssertionError with all output if it fails."""
    words, variables = [*map(str, command)], ENVIRONMENT | environment
    result = subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def start_ranks(number: int, *command: object, **environment: str) -> tuple[list[Started], dist.TCPStore]:
    """Start a script with arguments on ranks without torchrun. The ranks need the returned store. The others continue
    if a rank fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = ENVIRONMENT | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(number))
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"OMP_NUM_THREADS": "1"} | environment
    variables = [dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(number)]
    return [Started([*map(str, command)], common | own) for own in variables], store


def run_on_ranks(number: int, *command: object, **environment: str) -> str:
    """Run a script on ranks and return the output of rank 0. **Raises** AssertionError with that of a failed rank."""
    ranks, store = start_ranks(number, *command, **environment)
    try:
        for rank in ranks:
            assert rank.wait() == 0, rank.text()
    finally:
        for rank in ranks:
            rank.kill()
        del store
    return ranks[0].text()


def run_script(*command: object, status: int = 0, **environment: str) -> str:
    """Run a script on one process, without torchrun's variables, and return its output. **Raises** AssertionError with
    the output if the exit status is not `status`."""
    process = Started([*map(str, command)], ENVIRONMENT | environment)
    try:
        assert process.wait() == status, process.text()
    finally:
        process.kill()
    return process.text()


def run_text(text: str, *arguments: object, status: int = 0, **environment: str) -> str:
    """Run a program with this text like `run_script`."""
    with tempfile.TemporaryDirectory() as folder:
        (program := Path(folder) / "program.py").write_text(text)
        return run_script(program, *arguments, status=status, **environment)


def processes_with(path: Path) -> dict[int, str]:
    """Return, by process id, the command lines with `path`. (torchrun starts each rank in a session of its own.)"""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if str(path) in (command := file.read_text().replace("\0", " ")):
                found[int(file.parent.name)] = command
    return found
