"""Programs that tests start: the examples, under torchrun, or without it on ranks that start faster.

None has a limit of its own: what hangs is ended by the limit of each test, `timeout` in pyproject.toml.
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
    """Wait until `happened` returns true. **Raises** AssertionError after two minutes, longer than any thread or rank
    needs on a busy machine."""
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)


def run(*command: object, folder: Path | None = None, **environment: str) -> str:
    """What it prints, in a folder. **Raises** AssertionError with all that it says when it fails."""
    settings = {"env": ENVIRONMENT | environment, "cwd": folder, "text": True}
    result = subprocess.run([*map(str, command)], capture_output=True, **settings)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def start_ranks(number: int, *command: object, **environment: str) -> tuple[list[Started], dist.TCPStore]:
    """A script and its arguments on so many ranks, for which torchrun's part is played: they live as long as the store
    does, and go on when one of them fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = ENVIRONMENT | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return [Started([*map(str, command)], common | environment | names) for names in own], store


def run_on_ranks(number: int, *command: object) -> str:
    """What a script prints on rank 0. **Raises** AssertionError with all that a rank says when it fails."""
    ranks, store = start_ranks(number, *command)
    try:
        for rank in ranks:
            assert rank.wait() == 0, rank.text()
    finally:
        for rank in ranks:
            rank.kill()
        del store
    return ranks[0].text()


def run_script(*command: object, status: int = 0, **environment: str) -> str:
    """What it prints on one process, to which no torchrun is pretended. **Raises** AssertionError with that where it
    ends with another status."""
    process = Started([*map(str, command)], ENVIRONMENT | environment)
    try:
        assert process.wait() == status, process.text()
    finally:
        process.kill()
    return process.text()


def run_text(text: str, *arguments: object, status: int = 0, **environment: str) -> str:
    """What a program with this text prints, as run_script has it."""
    with tempfile.TemporaryDirectory() as folder:
        (program := Path(folder) / "program.py").write_text(text)
        return run_script(program, *arguments, status=status, **environment)


def processes_with(path: Path) -> dict[int, str]:
    """The command lines of the processes that were given `path`; torchrun puts its ranks into sessions of their own."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if str(path) in (command := file.read_text().replace("\0", " ")):
                found[int(file.parent.name)] = command
    return found
