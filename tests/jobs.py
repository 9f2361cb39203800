"""Start programs for tests: commands, scripts, and scripts on several ranks.

The ranks start without torchrun, which is slower.

A script does not wait until torch is imported: a server process has imported torch, and forks for each script. Apart
from these imports a script runs, and ends, as if Python had started it.

Programs have no time limit. A test that hangs ends after the `timeout` in pyproject.toml.
"""

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# The tests may run under torchrun, but the programs are not ranks of that torchrun.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
# The slowest imports. A module that is not installed is skipped. syncbn is not in the list, because a script may change
# torch or the environment before it imports syncbn.
PRELOADED = "torch.distributed.fsdp", "sklearn.datasets", "matplotlib.pyplot"
# This module is imported after gc.freeze. It imports triton, and triton 3.9 warns at the end of a script if gc.freeze
# has frozen triton's objects.
PRELOADED_AFTER_FREEZE = "torch._dynamo"


def wait_until(condition: Callable[[], object], describe: Callable[[], str] = str) -> None:
    """Wait until `condition` returns true. **Raises** AssertionError with the text of `describe` after two minutes,
    enough for a busy machine. The default, `str`, returns an empty text."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"timed out after two minutes {describe()}"
        time.sleep(0.02)


def run(*command: object, folder: Path | None = None, **environment: str) -> str:
    """Run a command in a folder and return its output. **Raises** AssertionError with all output if it fails."""
    result = subprocess.run(
        [*map(str, command)], env=ENVIRONMENT | environment, cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class Script(contextlib.AbstractContextManager["Script"]):
    """A Python script that runs with its arguments, in its own session. The end of the context sends SIGTERM to its
    process group, and SIGKILL after 40 s. On SIGTERM torchrun ends its ranks, which have sessions of their own."""

    def __init__(self, *command: object, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name) / "output"
        self._status: int | None = None
        self.pid: int = _ask_server([*map(str, command)], ENVIRONMENT | environment, str(self._output))

    def poll(self) -> int | None:
        """Return the exit status, negative after a signal, or None while the script runs."""
        if self._status is None:
            self._status = _ask_server(self.pid)
        return self._status

    def wait(self, seconds: float = math.inf) -> int | None:
        """Wait for the end of the script, but not longer than `seconds`. Return the result of `poll`."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.poll()

    def output(self) -> str:
        """Return the standard output and standard error so far."""
        return self._output.read_text()

    def __exit__(self, *_: object) -> None:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if self.poll() is None:
                os.killpg(self.pid, signal_number)
                self.wait(40)
        self._folder.cleanup()


def run_script(*command: object, status: int = 0, **environment: str) -> str:
    """Run a script on one process, and return its output. **Raises** AssertionError with the output if the exit status
    is not `status`."""
    with Script(*command, **environment) as script:
        assert script.wait() == status, script.output()
        return script.output()


def run_text(text: str, *arguments: object, status: int = 0, **environment: str) -> str:
    """Write the Python code `text` to a script, and run the script like `run_script`."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(text)
        return run_script(program, *arguments, status=status, **environment)


@contextlib.contextmanager
def started_ranks(num_ranks: int, *command: object, **environment: str) -> Iterator[list[Script]]:
    """Start a script on ranks, without torchrun. The end of a rank does not end the other ranks. The end of the
    context kills the ranks, and then releases `store`, which serves the ranks until then."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # Rank 0 then starts no second store.
    variables |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in map(str, range(num_ranks)):
            script = Script(*command, **(variables | {"RANK": rank, "LOCAL_RANK": rank} | environment))
            ranks.append(stack.enter_context(script))
        yield ranks


def run_on_ranks(num_ranks: int, *command: object, **environment: str) -> str:
    """Run a script on ranks, and return the output of rank 0. **Raises** AssertionError with the output of a rank that
    fails."""
    with started_ranks(num_ranks, *command, **environment) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, rank.output()
        return ranks[0].output()


def processes_with(path: Path) -> dict[int, str]:
    """Return the command lines that contain `path`, by process id.

    The ranks that torchrun starts are found. A `Script` is not found: it is a fork of the server, and has the server's
    command line.
    """
    commands = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = file.read_text().replace("\0", " ")
            if str(path) in command:
                commands[int(file.parent.name)] = command
    return commands


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server, which ends with this process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # A fork copies one thread only, so the server has no others.
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _ask_server(*request: object) -> Any:
    """Start a script if `request` is the arguments of `_run_script`, and return its process id. If `request` is a
    process id, return the exit status of the script, or None while it runs."""
    print(json.dumps(request), file=_server().stdin, flush=True)
    return json.loads(_server().stdout.readline())


def _run_script(command: list[str], environment: dict[str, str], output: str) -> NoReturn:
    os.setsid()
    output_file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    print(os.getpid(), flush=True)  # The answer to `_ask_server`, sent when the session and the output file exist.
    for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output_file, 1), (output_file, 2)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # Otherwise garbage collection at the end of each script would copy the memory of all objects.
    importlib.import_module(PRELOADED_AFTER_FREEZE)
    for line in sys.stdin:
        request = json.loads(line)
        if len(request) == 1:
            pid, status = os.waitpid(request[0], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        elif os.fork() == 0:
            _run_script(*request)
