"""Start programs for tests: under torchrun, or on ranks without torchrun, which start faster.

The programs have no time limit. A test that hangs ends after the `timeout` in pyproject.toml.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from starter import Started

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ON_TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` returns true. **Raises** AssertionError after two minutes, enough for a busy machine."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "timed out after two minutes"
        time.sleep(0.02)


def run(*command: object, folder: Path | None = None, **environment: str) -> str:
    """Run a command in a folder and return its output. **Raises** AssertionError with all output if it fails."""
    result = subprocess.run(
        [*map(str, command)], env=ENVIRONMENT | environment, cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_script(*command: object, status: int = 0, **environment: str) -> str:
    """Run a script on one process, without torchrun's variables, and return its output. **Raises** AssertionError with
    the output if the exit status is not `status`."""
    process = Started([*map(str, command)], ENVIRONMENT | environment)
    try:
        assert process.wait() == status, process.output()
    finally:
        process.kill()
    return process.output()


def run_text(text: str, *arguments: object, status: int = 0, **environment: str) -> str:
    """Write the Python code `text` to a script, and run the script like `run_script`."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(text)
        return run_script(program, *arguments, status=status, **environment)


@contextlib.contextmanager
def started_ranks(num_ranks: int, *command: object, **environment: str) -> Iterator[list[Started]]:
    """Start a script with arguments on ranks, without torchrun. The end of a rank does not end the other ranks. Kill
    the ranks at the end of the context, and then end their store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(num_ranks):
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(Started([*map(str, command)], ENVIRONMENT | variables | environment))
        yield ranks
    finally:
        for started in ranks:
            started.kill()


def run_on_ranks(num_ranks: int, *command: object, **environment: str) -> str:
    """Run a script on ranks, and return the output of rank 0. **Raises** AssertionError with the output of a rank that
    fails."""
    with started_ranks(num_ranks, *command, **environment) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, rank.output()
        return ranks[0].output()


def processes_with(path: Path) -> dict[int, str]:
    """Return the command lines that contain `path`, by process id. (Each rank of torchrun has a session of its own, so
    the session of torchrun does not contain the ranks.)"""
    commands = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = file.read_text().replace("\0", " ")
            if str(path) in command:
                commands[int(file.parent.name)] = command
    return commands
