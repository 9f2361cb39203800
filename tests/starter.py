"""Start Python programs that need not import torch: a server process has imported torch, and forks for each program.

Apart from these imports a program runs, and ends, as if Python had started it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# The slowest imports, which are skipped if not installed. syncbn reads the environment, so each program imports it.
PRELOADED = "torch.distributed.fsdp", "sklearn.datasets", "matplotlib.pyplot"
# This module imports triton 3.9, which warns at exit of its objects that are frozen.
PRELOADED_AFTER_FREEZE = "torch._dynamo"
_starting = threading.Lock()  # The server answers one request at a time.


class Started:
    """A program that the server has started, in a session of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=_folder()))
        self.status_file = self.folder / "status"
        request = {"arguments": arguments, "environment": environment, "folder": str(self.folder)}
        with _starting:
            print(json.dumps(request), file=_server().stdin, flush=True)
            self.pid = int(_server().stdout.readline())

    def poll(self) -> int | None:
        """Return the exit status, negative after a signal, or None while the program runs."""
        return int(self.status_file.read_text()) if self.status_file.exists() else None

    def wait(self) -> int | None:
        """Wait for the end of the program, and return the exit status."""
        while self.poll() is None:
            time.sleep(0.02)
        return self.poll()

    def kill(self) -> None:
        """Kill the program and the processes in its session, unless the program has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # The program has ended since the poll.
                os.killpg(self.pid, signal.SIGKILL)

    def output(self) -> str:
        """Return the standard output and standard error so far."""
        return (self.folder / "output").read_text()


@functools.cache
def _folder() -> str:
    """Create the folder of all programs, which is removed when this process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server, which ends with this process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # A fork has one thread, so the server may have no second one.
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _serve() -> list[str]:
    """Fork a waiting process for each request. The waiting process forks the program, and writes the exit status.

    In a program, return the arguments of the program. In the server, return an empty list when the requests end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps the waiting processes.
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        program = os.fork()
        if program:
            print(program, flush=True)
            status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            (folder / "new status").write_text(str(status))
            (folder / "new status").rename(folder / "status")  # No reader finds an empty file.
            os._exit(0)
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        return list(request["arguments"])
    return []


if __name__ == "__main__":
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # Otherwise garbage collection at the end of each program would copy the memory of all objects.
    importlib.import_module(PRELOADED_AFTER_FREEZE)
    sys.argv = _serve()
    if sys.argv:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
