"""Starts Python programs that need not import torch anew: a process that has done so forks for each.

What they do from then on, up to the interpreter's end, they do as if they had been started by themselves.
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

# What programs import that takes long, where it is installed; not syncbn, which reads the environment.
PRELOADED = "torch.distributed.fsdp", "sklearn.datasets", "matplotlib.pyplot"
# Not among the frozen objects: it imports triton, which (3.9) complains of objects that are not collected in the end.
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
        """The exit status, negative where a signal ended it; None of one that runs."""
        return int(self.status_file.read_text()) if self.status_file.exists() else None

    def wait(self) -> int:
        """The exit status."""
        while (status := self.poll()) is None:
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        """With all that it has started, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.killpg(self.pid, signal.SIGKILL)

    def text(self) -> str:
        """All that it has written to standard output and error."""
        return (self.folder / "text").read_text()


@functools.cache
def _folder() -> str:
    """Of all programs, until this process ends."""
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
    """Returns in each program, with its arguments, and in the server at the end of the tests, with none."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the programs
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
    gc.freeze()  # else each program copies all these objects when it ends, as it then collects garbage
    __import__(PRELOADED_LAST)
    sys.argv = _serve()
    if sys.argv:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
