"""A process that C++ ends may report before, and ends all the same. tests/faults.py has ranks that gloo ends so."""

from pathlib import Path

import pytest
from jobs import run_text

from syncbn.diagnosis import termination

pytestmark = pytest.mark.skipif(
    not Path(termination.__file__).with_name("_termination.so").exists(), reason="built without C++"
)

TERMINATED = "terminate called without an active exception\n"
PROGRAM = """
import ctypes, os, threading, time
import torch.distributed as dist
from syncbn.diagnosis import termination, watchdog
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
terminate_with_gil = ctypes.PyDLL("libstdc++.so.6")._ZSt9terminatev

def report():
    while not termination.has_begun():
        time.sleep(0.01)
    print("reported", flush=True)
    termination.ignore()

def become_a_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watchdog.this_rank()

def say_if_it_waits():
    time.sleep(2.5)
    print("it waits", flush=True)

threading.Thread(target=say_if_it_waits, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("terminate()", TERMINATED),
        ("termination.watch(); termination.ignore(); terminate()", TERMINATED),
        ("threading.Thread(target=report).start(); termination.watch(); terminate()", f"reported\n{TERMINATED}"),
        ("termination.watch(); terminate()", f"it waits\n{TERMINATED}"),  # for 3 s, as nobody answers
        ("become_a_rank(); terminate()", TERMINATED),  # a rank that waits for no other
        ("become_a_rank(); os.abort()", ""),
        ("become_a_rank(); terminate_with_gil()", TERMINATED),  # no thread can answer
        ("become_a_rank(); os.fork() or terminate(); os.wait(); os.abort()", TERMINATED),  # no thread is in the child
    ],
)
def test_it_ends(program: str, said: str) -> None:
    assert run_text(f"{PROGRAM}\n{program}", status=-6) == said


def test_a_rank_is_watched_until_its_group_ends() -> None:
    program = """
become_a_rank()
assert termination._state().value == termination.WATCHED
dist.destroy_process_group()
assert termination._state().value == termination.UNWATCHED
"""
    assert run_text(PROGRAM + program) == ""
