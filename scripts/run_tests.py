"""Run the tests in parallel parts, and print the progress every 10 s (in a log every 30 s).

    scripts/test.sh                     makes .venv first
    scripts/test.sh --quick             one process and 2 ranks, without tests that are slow, compile or start programs
    scripts/test.sh --nightly           instead the tests of scripts/ and of the voting plugin, and all tests on 4 ranks
    scripts/test.sh -k mask             other arguments go to pytest

The parts on 2, 3 (with the reference kernels) and 4 ranks start last, because they use all cores. On 3 ranks run the
files in which something depends on the number of ranks; on 4 ranks, unless --nightly, only promises that groups or a
fourth rank may break: FOUR_RANKS. The output of each part goes to runs/tests. At the end, print the logs of the failed
parts and pytest's summary of every part. (pytest-xdist cannot start ranks, and make shows no progress.)
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

LOGS = Path("runs/tests")
AT_ONCE = 4  # Parts that start programs wait more than they compute.
LINE_SECONDS = 10.0 if sys.stdout.isatty() else 30.0
FAILED_LINES = 200  # lines shown of a failed part's log
STARTS_PROGRAMS = {  # part -> its files, tests/test_NAME.py; the longest part comes first
    "programs": "lightning package readme testing",
    "crashes": "crashes faults two_hosts",
    "examples": "examples",
}
COMPILES = "gpu_static", "inductor"
INTERPRETED = "kernels", "triton"  # with Triton's interpreter
# Of tests/distributed: files in which nothing depends on the number of ranks; files that also run on 4 ranks.
TWO_RANKS = ("conversion",)
FOUR_RANKS = "ddp", "equality", "fsdp", "fuzz", "groups", "pipeline_schedules"
TORCHRUN = "torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node"
PYTEST = "pytest -v -o console_output_style=count"  # prints a line with the number of each test


def test_file(name: str) -> str:
    return f"tests/test_{name}.py"


class Part:
    """A pytest in one process or on several ranks."""

    def __init__(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        self.name, self.log, self.environment = name, LOGS / f"{name}.log", os.environ | environment
        self.command = [sys.executable, "-m", *module.split(), *arguments]

    def start(self) -> None:
        self.start_time = time.monotonic()
        with self.log.open("w") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "process_group": 0}
            self.process = subprocess.Popen(self.command, env=self.environment, **options)

    def end(self) -> None:
        """End the part with all processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()

    def failed(self) -> bool:
        return self.process.returncode not in (0, 5)  # 5: the arguments select no test of this part

    def find(self, pattern: str) -> list[str]:
        """Return the matches of a pattern in the log."""
        return re.findall(pattern, self.log.read_text(errors="replace"), re.MULTILINE)

    def progress(self) -> str:
        num_failed = len(self.find(r" (?:FAILED|ERROR) .*\[ *\d+/\d+\]$"))
        ended = ["starts", *self.find(r"\[ *(\d+/\d+)\]$")][-1]
        return f"{self.name} {ended}" + f" ({num_failed} failed)" * (num_failed > 0)

    def summary(self) -> str:
        """Return pytest's last line, or the exit status."""
        status = f"exit status {self.process.returncode}, without a summary"
        return [status, *self.find(r"^=+ (.* in [0-9.]+s.*?) =+$")][-1]


def distributed(names: Iterable[str], prefix: str = "") -> list[str]:
    return [f"{prefix}tests/distributed/test_{name}.py" for name in names]


def on_ranks(count: int, *arguments: str, name: str = "", **environment: str) -> Part:
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    module = f"{TORCHRUN} {count} -m {PYTEST} -p voting"
    return Part(f"{count} ranks{name}", module, *arguments, PYTHONPATH=path, **environment)


def make_parts(which: str, arguments: list[str]) -> list[Part]:
    """Return the parts of "--quick", "--nightly" or all tests (""), in the order in which they start."""
    if which == "--nightly":
        return [Part("nightly", PYTEST, "tests/nightly", *arguments), on_ranks(4, "tests/distributed", *arguments)]
    apart = [test_file(name) for files in STARTS_PROGRAMS.values() for name in files.split()]
    if which == "--quick":
        apart += map(test_file, COMPILES)
        arguments = ["-m", "not slow and not compiles", *arguments]
    ignored = [f"--ignore={path}" for path in ("tests/distributed", "tests/nightly", *apart)]
    one_process = Part("one process", PYTEST, "tests", *ignored, *arguments)
    two_ranks = on_ranks(2, "tests/distributed", *arguments)
    if which == "--quick":
        return [one_process, two_ranks]
    programs = {name: map(test_file, files.split()) for name, files in STARTS_PROGRAMS.items()}
    interpreted = {"TRITON_INTERPRET": "1"}
    return [
        *(Part(name, PYTEST, *files, *arguments) for name, files in programs.items()),
        Part("interpreted", PYTEST, *map(test_file, INTERPRETED), "-m", "triton", *arguments, **interpreted),
        one_process,
        two_ranks,
        on_ranks(2, *distributed(["status"]), *arguments, name=", interpreted", **interpreted),
        on_ranks(3, "tests/distributed", *distributed(TWO_RANKS, "--ignore="), *arguments, SYNCBN_KERNELS="reference"),
        on_ranks(4, *distributed(FOUR_RANKS), *arguments),
    ]


def run(parts: list[Part]) -> bool:
    """Run the parts and print their progress. Return whether all have passed."""
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
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                outcome = "has FAILED" if part.failed() else "has ended"
                print(f"[{now - start:4.0f} s] {part.name} {outcome} after {now - part.start_time:.0f} s", flush=True)
            if running and now - last_line > LINE_SECONDS:
                later = "; then " + ", ".join(part.name for part in waiting) if waiting else ""
                text = ", ".join(part.progress() for part in running) + later
                print(f"[{now - start:4.0f} s] running: {text}", flush=True)
                last_line = now
    finally:
        for part in running:
            part.end()
    failed = [part for part in parts if part.failed()]
    for part in failed:
        print(f"== failed: {part.name}", *part.find("^.*$")[-FAILED_LINES:], sep="\n")
    for part in parts:
        print(f"{part.name}: {part.summary()}")
    return not failed


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # The exit ends the parts.
    os.chdir(Path(__file__).parent.parent)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # With it, some 200 processes would each compile the same files.
    which = sys.argv.pop(1) if sys.argv[1:2] in (["--quick"], ["--nightly"]) else ""
    try:
        sys.exit(not run(make_parts(which, sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
