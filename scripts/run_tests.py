"""Run the tests in parts, several at a time, and print the progress every 10 s (every 30 s without a terminal).

    scripts/test.sh                     makes .venv first
    scripts/test.sh --quick             one process and 2 ranks, without tests that are slow, compile or start programs
    scripts/test.sh --nightly           only the tests of scripts/ and of the plugin voting, and all tests on 4 ranks
    scripts/test.sh -k mask             other arguments go to pytest

The output of each part goes to runs/tests. At the end the script prints the logs of the failed parts, and pytest's
summary of each part. (pytest-xdist cannot start ranks, and make shows no progress.)
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

LOGS = Path("runs/tests")
AT_ONCE = 4  # parts that run at a time, on two cores, because tests that start programs often wait
LINE_SECONDS = 10.0 if sys.stdout.isatty() else 30.0
FAILED_LINES = 200  # lines of a failed part's log that are printed
STARTS_PROGRAMS = {  # part -> names of its files, tests/test_NAME.py; the longest part starts first
    "programs": "lightning package readme testing",
    "crashes": "crashes faults two_hosts",
    "examples": "examples",
}
COMPILES = "gpu_static", "inductor"  # --quick leaves these files out
INTERPRETED = "kernels", "triton"  # Triton's interpreter runs these files, too.
# Files of tests/distributed that do not run on 3 ranks, because the number of ranks does not matter.
TWO_RANKS = ("conversion",)
# Files of tests/distributed that also run on 4 ranks, because groups or a fourth rank may break their promises.
FOUR_RANKS = "ddp", "fsdp", "fuzz", "groups", "pipeline_schedules", "promises"
TORCHRUN = "torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node"
PYTEST = "pytest -v -o console_output_style=count"  # prints a line with its number for each test


def test_file(name: str) -> str:
    return f"tests/test_{name}.py"


class Part:
    """A program whose output goes to a log: pytest, in one process or on several ranks."""

    def __init__(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        self.name, self.log, self.environment = name, LOGS / f"{name}.log", os.environ | environment
        self.command = [sys.executable, "-m", *module.split(), *arguments]

    def start(self) -> None:
        self.start_time = time.monotonic()
        with self.log.open("w") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "process_group": 0}
            self.process = subprocess.Popen(self.command, env=self.environment, **options)

    def end(self, seconds: float = 40) -> None:
        """End the program with its children: by SIGTERM, and by SIGKILL after these seconds. On SIGTERM torchrun ends
        its ranks, which are in other process groups, within 30 s."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal_number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)

    def failed(self) -> bool:
        return self.process.returncode not in (0, 5)  # 5: the arguments select no test of this part

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def find(self, pattern: str) -> list[str]:
        """Return the matches of a pattern in the log."""
        return re.findall(pattern, self.text(), re.MULTILINE)

    def progress(self) -> str:
        """Format the numbers of tests that have ended and that have failed."""
        num_failed = len(self.find(r" (?:FAILED|ERROR) .*\[ *\d+/\d+\]$"))
        numbers = ["starts", *self.find(r"\[ *(\d+/\d+)\]$")]
        return f"{self.name} {numbers[-1]}" + (f" ({num_failed} failed)" if num_failed else "")

    def summary(self) -> str:
        """Return pytest's last line, or the exit status if pytest has not printed that line."""
        status = f"exit status {self.process.returncode}, without a summary"
        return [status, *self.find(r"^=+ (.* in [0-9.]+s.*?) =+$")][-1]


def distributed(names: Iterable[str], prefix: str = "") -> list[str]:
    return [f"{prefix}tests/distributed/test_{name}.py" for name in names]


def on_ranks(count: int, *arguments: str, name: str = "", **environment: str) -> Part:
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    module = f"{TORCHRUN} {count} -m {PYTEST} -p voting"
    return Part(f"{count} ranks{name}", module, *arguments, PYTHONPATH=path, **environment)


def make_parts(option: str, arguments: list[str]) -> list[Part]:
    """Return the parts of "--quick", "--nightly" or all tests (""), in the order in which they start.

    The parts on ranks start last, because each of them uses all cores.
    """
    if option == "--nightly":
        return [Part("nightly", PYTEST, "tests/nightly", *arguments), on_ranks(4, "tests/distributed", *arguments)]
    ignored = ["tests/distributed", "tests/nightly"]
    ignored += map(test_file, " ".join(STARTS_PROGRAMS.values()).split())
    if option == "--quick":
        ignored += map(test_file, COMPILES)
        arguments = ["-m", "not slow and not compiles", *arguments]
    one_process = Part("one process", PYTEST, "tests", *(f"--ignore={path}" for path in ignored), *arguments)
    two_ranks = on_ranks(2, "tests/distributed", *arguments)
    if option == "--quick":
        return [one_process, two_ranks]
    interpreted = {"TRITON_INTERPRET": "1"}
    return [
        *(Part(name, PYTEST, *map(test_file, files.split()), *arguments) for name, files in STARTS_PROGRAMS.items()),
        Part("interpreted", PYTEST, *map(test_file, INTERPRETED), "-m", "triton", *arguments, **interpreted),
        one_process,
        two_ranks,
        on_ranks(2, *distributed(["status"]), *arguments, name=", interpreted", **interpreted),
        on_ranks(3, "tests/distributed", *distributed(TWO_RANKS, "--ignore="), *arguments, SYNCBN_KERNELS="reference"),
        on_ranks(4, *distributed(FOUR_RANKS), *arguments),
    ]


def run(parts: list[Part]) -> bool:
    """Run the parts and print their progress. Return whether all of them have passed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    start = last_line = time.monotonic()
    waiting, running = [*parts], []
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.1)
            now = time.monotonic()
            for part in [*running]:
                if part.process.poll() is not None:
                    running.remove(part)
                    outcome = "has FAILED" if part.failed() else "has ended"
                    seconds = now - part.start_time
                    print(f"[{now - start:4.0f} s] {part.name} {outcome} after {seconds:.0f} s", flush=True)
            if running and now - last_line > LINE_SECONDS:
                line = "running: " + ", ".join(part.progress() for part in running)
                if waiting:
                    line += "; then " + ", ".join(part.name for part in waiting)
                print(f"[{now - start:4.0f} s] {line}", flush=True)
                last_line = now
    finally:
        for part in running:
            part.end()
    failed = [part for part in parts if part.failed()]
    for part in failed:
        print(f"== failed: {part.name}", *part.text().splitlines()[-FAILED_LINES:], sep="\n")
    for part in parts:
        print(f"{part.name}: {part.summary()}")
    return not failed


def main() -> None:
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: sys.exit("interrupted"))  # The exit ends the running parts.
    os.chdir(Path(__file__).parent.parent)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # With it, some 200 processes would each compile the same files.
    option = sys.argv.pop(1) if sys.argv[1:2] in (["--quick"], ["--nightly"]) else ""
    sys.exit(not run(make_parts(option, sys.argv[1:])))


if __name__ == "__main__":
    main()
