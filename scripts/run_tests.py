"""Run the tests in parts, several at a time, and print the progress every 10 s (every 30 s without a terminal).

    scripts/test.sh                     all tests; the shell script creates .venv and then starts run_tests.py
    scripts/test.sh --quick             one process and 2 ranks, without tests that are slow, compile or start programs
    scripts/test.sh --nightly           only tests/nightly, and tests/distributed on 4 ranks
    scripts/test.sh -k mask             other arguments go to pytest

The output of each part goes to runs/tests. At the end the script prints the logs of the failed parts, and pytest's
summary of each part. pytest-xdist could not replace this script, because it cannot start ranks. make could not replace
it either, because make shows no progress.
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
MAX_RUNNING = 4  # Four parts run at the same time even on two cores, because tests that start programs often wait.
LINE_SECONDS = 10.0 if sys.stdout.isatty() else 30.0
FAILED_LINES = 200  # lines of a failed part's log that are printed
# Each of these files tests/test_NAME.py is a part, which --quick leaves out.
COMPILES, STARTS_PROGRAMS = ("inductor", "gpu_static"), ("faults", "examples", "testing", "package")
INTERPRETED = "kernels", "triton"  # Triton's interpreter runs these files, too.
# Files of tests/distributed that also run on 4 ranks, because their promises depend on the number of ranks or groups.
FOUR_RANKS = "fuzz", "groups", "promises", "wrappers"
TORCHRUN = "torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node"
PYTEST = "pytest -v -o console_output_style=count"  # prints a line for each test, which ends with "[ 12/345]"


def to_paths(names: Iterable[str], folder: str = "tests") -> list[str]:
    return [f"{folder}/test_{name}.py" for name in names]


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
        no_tests_selected = 5  # pytest's exit status
        return self.process.returncode not in (0, no_tests_selected)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def progress(self) -> str:
        """Format the number of tests that have ended, of all tests, and of tests that have failed."""
        ended = re.findall(r"^.*\[ *\d+/\d+\]$", self.text(), re.MULTILINE)
        num_failed = sum(" FAILED " in line or " ERROR " in line for line in ended)
        numbers = ended[-1].rpartition("[")[2].strip(" ]") if ended else "starts"
        return f"{self.name} {numbers}" + (f" ({num_failed} failed)" if num_failed else "")

    def summary(self) -> str:
        """Return pytest's last line, or the exit status if pytest has not printed that line."""
        lines = re.findall(r"^=+ (.* in [0-9.]+s.*?) =+$", self.text(), re.MULTILINE)
        return lines[-1] if lines else f"exit status {self.process.returncode}, without a summary"


def on_ranks(number: int, *arguments: str, suffix: str = "", **environment: str) -> Part:
    """Return a part that runs pytest on several ranks. The part is named "2 ranks", followed by `suffix`."""
    module = f"{TORCHRUN} {number} -m {PYTEST} -p voting"
    path = f"tests{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return Part(f"{number} ranks{suffix}", module, *arguments, PYTHONPATH=path, **environment)


def make_parts(option: str, arguments: list[str]) -> list[Part]:
    """Return the parts of "--quick", "--nightly" or all tests (""), in the order in which they start.

    The longest parts start first. The parts on ranks start last, because each of them uses all cores.
    """
    if option == "--nightly":
        return [Part("nightly", PYTEST, "tests/nightly", *arguments), on_ranks(4, "tests/distributed", *arguments)]
    files = *COMPILES, *STARTS_PROGRAMS
    ignored = "tests/distributed", "tests/nightly", *to_paths(files)
    if option == "--quick":
        arguments = ["-m", "not slow and not compiles", *arguments]
    one_process = Part("one process", PYTEST, "tests", *(f"--ignore={path}" for path in ignored), *arguments)
    two_ranks = on_ranks(2, "tests/distributed", *arguments)
    if option == "--quick":
        return [one_process, two_ranks]
    interpreted = {"TRITON_INTERPRET": "1"}
    # Three ranks run kernels/reference.py in place of the C++ kernels. A third rank adds nothing to test_conversion.py.
    three_ranks = "tests/distributed", "--ignore=tests/distributed/test_conversion.py"
    return [
        *(Part(name, PYTEST, *to_paths([name]), *arguments) for name in files),
        one_process,
        Part("interpreted", PYTEST, *to_paths(INTERPRETED), "-m", "triton", *arguments, **interpreted),
        two_ranks,
        on_ranks(2, "tests/distributed/test_status.py", *arguments, suffix=", interpreted", **interpreted),
        on_ranks(3, *three_ranks, *arguments, SYNCBN_KERNELS="reference"),
        on_ranks(4, *to_paths(FOUR_RANKS, "tests/distributed"), *arguments),
    ]


def run(parts: list[Part]) -> bool:
    """Run the parts and print their progress. Return whether all of them have passed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    start = last_line = time.monotonic()

    def report(text: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    waiting, running = [*parts], []
    try:
        while waiting or running:
            while waiting and len(running) < MAX_RUNNING:
                waiting[0].start()
                running.append(waiting.pop(0))
            time.sleep(0.1)
            for part in [*running]:
                if part.process.poll() is not None:
                    running.remove(part)
                    outcome = "has FAILED" if part.failed() else "has ended"
                    report(f"{part.name} {outcome} after {time.monotonic() - part.start_time:.0f} s")
            if running and time.monotonic() - last_line > LINE_SECONDS:
                then = f"; then {', '.join(part.name for part in waiting)}" if waiting else ""
                report(f"running: {', '.join(part.progress() for part in running)}{then}")
                last_line = time.monotonic()
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
    option = sys.argv.pop(1) if sys.argv[1:2] in (["--quick"], ["--nightly"]) else ""
    sys.exit(not run(make_parts(option, sys.argv[1:])))


if __name__ == "__main__":
    main()
