"""Start Python programs without their import of torch: a server process has imported it and forks for each program.

Apart from these imports a program runs, and ends, as if Python had started it.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Imports that take long, skipped if not installed. syncbn is missing because it reads the environment.
PRELOADED = "torch.distributed.fsdp", "sklearn.datasets", "matplotlib.pyplot"
# Imported after gc.freeze(): it imports triton, which (3.9) warns of objects that are not collected at the end.
PRELOADED_LAST = "torch._dynamo"


class Started:
    """A program in a session of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=_folder()))
        self.status_file = self.folder / "status"
        request = {"arguments": arguments, "environment": environment, "folder": str(self.folder)}
        server = _server()
        print(json.dumps(request), file=server.stdin, flush=True)
        self.pid = int(server.stdout.readline())

    def poll(self) -> int | None:
        """Return the exit status, negative after a signal, or None while the program runs."""
        return int(self.status_file.read_text()) if self.status_file.exists() else None

    def wait(self) -> int:
        """Wait for the end of the program and return its exit status."""
        while (status := self.poll()) is None:
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        """Kill the program and the processes that it has started, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the program has ended
                os.killpg(self.pid, signal.SIGKILL)

    def text(self) -> str:
        """Return the standard output and error."""
        return (self.folder / "text").read_text()


@functools.cache
def _folder() -> str:
    """Create the folder of all programs, which is removed when this process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a thread would not survive the fork
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _serve() -> list[str]:
    """Fork for each request. Return in each program with its arguments, and in the server at its end with none."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that wait for programs
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        program = os.fork()
        if program:  # this process waits for it
            print(program, flush=True)
            status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            unready = folder / "unready"
            unready.write_text(str(status))
            unready.rename(folder / "status")
            os._exit(0)
        os.setsid()
        text = os.open(folder / "text", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(text, 1)
        os.dup2(text, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        return list(request["arguments"])
    return []


if __name__ == "__main__":
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()  # otherwise the garbage collection at the end of each program copies the memory of all objects
    __import__(PRELOADED_LAST)
    sys.argv = _serve()
    if sys.argv:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
