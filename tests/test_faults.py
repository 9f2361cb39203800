"""Tests what ranks print if a rank does something wrong or a link is cut, that all ranks end, and that jobs continue.

faulty_job.py is a job whose last rank has a fault, and whose collectives have a timeout of 3 s.
docs/when_ranks_disagree.md has a table of faults.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.run
from jobs import ENVIRONMENT, EXAMPLES, TORCHRUN, Script, processes_with, run_on_ranks, started_ranks, wait_until

from syncbn.ranks.positions import process_state

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults are for CPUs and gloo")
JOB = Path(__file__).with_name("faulty_job.py")


class Fault(NamedTuple):
    """The expected output and exit statuses of a job."""

    first_output: str  # a regular expression for the output of rank 0
    last_output: str = ""  # a regular expression for the output of the last rank
    num_ranks: int = 2
    num_successful: int = 0  # the number of ranks with exit status 0


def positions(rank_0: str, rank_1: str) -> str:
    """Return a regular expression for the lines of two ranks.

    Which rank fails first varies. A line may therefore have "last seen" before the position, and after the position
    the error that ended the rank and the age of the position.
    """
    end = r"(; has left with .*)?(; written \S+ s ago)?\n"
    return f"rank 0: (last seen )?{rank_0}{end}rank 1: (last seen )?{rank_1}{end}"


IN_BN1, IN_BN2 = "in body.bn1 forward, call 3", "in body.bn2 forward, call 3"
AFTER_BN1, AFTER_STEP_2 = "after body.bn1 forward, call 3", "after body.bn1 backward, call 2"
# The text in parentheses is missing if the rank has ended before it has written its position.
WITH_CHANNELS = r"(in body.bn1 forward, call 1; )?has called body.bn1 in Sequential with {} channels over ranks 0-1.*"
IN_MODEL = "in layer '1' forward, call 3; number {} of layer '1' in Sequential"
NOTHING = r"^\Z"
ITS_PROCESS = r"; its process \(\d+\) "
CAUSES = "Possible causes:\n- "
FAULTS = {
    "none": Fault(NOTHING, NOTHING, num_successful=2),
    "skips a layer": Fault(positions(IN_BN2, "in body.bn3 forward, call 3") + f"{CAUSES}A rank has left out a layer"),
    "out of memory, caught": Fault(
        positions("in body.bn3 backward, call 3", "in body.bn1 forward, call 4")
        + f"{CAUSES}A rank has called the model once more"
    ),
    "exception in forward": Fault(
        positions(IN_BN2, f"{AFTER_BN1}; has left with KeyError: .*"),
        r"\nKeyError: [^\n]*\n\Z",  # The traceback ends the output. No report follows.
    ),
    "kill -9 in forward": Fault(
        positions(IN_BN2, f"last seen {AFTER_BN1}{ITS_PROCESS}has ended") + f"{CAUSES}Read the last output"
    ),
    "stopped for longer than the timeout": Fault(
        positions(IN_BN1, f"last seen {AFTER_STEP_2}{ITS_PROCESS}is stopped") + "A debugger or a signal"
    ),
    # Each other rank has six batches. The last rank has seven, or five, or six and a validation.
    "one more step": Fault(
        "",
        positions("after body.bn1 backward, call 6; has left", "in body.bn1 forward, call 7")
        + f"{CAUSES}A rank has fewer batches",
        num_successful=1,
    ),
    "one batch less, then a metric": Fault(  # The other two ranks wait in DistributedDataParallel's broadcast.
        r"a collective outside of syncbn's layers failed on rank 0\.\n(ranks? .* body.bn1 .*\n)+(.*\n)*.*empty batch",
        num_ranks=3,
    ),
    # DistributedDataParallel broadcasts buffers before each forward. In the third step the broadcast of the last rank's
    # evaluation meets that of rank 0's training. Rank 0 then waits in a layer, and the last rank in its next broadcast.
    "validates through DDP": Fault(positions(IN_BN1, AFTER_STEP_2)),
    # The models or the inputs differ.
    "channels": Fault(
        "gloo::EnforceNotMet",  # gloo ends rank 0 before rank 0 can report.
        # Rank 1 reports sums of different sizes if those of rank 0 arrive before rank 0 ends, and otherwise a failure.
        r"(sums of different sizes|a collective failed on rank 1 after .*)\.\n"
        + positions(WITH_CHANNELS.format(4), WITH_CHANNELS.format(5))
        + "Build the same model on every rank",
    ),
    # The last rank passes 4 channels and a weight of 3, and records its ValueError before gloo ends it.
    "two numbers of channels": Fault(
        r"rank 1: (last seen )?in sync_batch_norm forward, call 1; .*has raised ValueError: expected 3 channels",
        "gloo::EnforceNotMet",
    ),
    "autocast": Fault(
        positions(f"{IN_BN1}, with an input of torch.float32", f"{IN_BN1}, with an input of torch.bfloat16")
    ),
    "two models, another order": Fault(
        positions(IN_MODEL.format(1), IN_MODEL.format(2)) + "Several models of one class"
    ),
    # The process groups differ.
    "a group on one rank alone": Fault(positions(IN_BN1, "in the creation of groups for process_group=2.*")),
    "fork after use": Fault(
        positions(IN_BN1, f"{AFTER_STEP_2}; has left.*"),
        r'this process \(\d+\) was forked from a process .* Start it by the method "spawn" instead',
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_ranks_report_the_fault_and_end(name: str) -> None:
    fault = FAULTS[name]
    with started_ranks(fault.num_ranks, JOB, name) as ranks:
        if name.startswith("stopped"):  # Continue the last rank after the error of rank 0.
            wait_until(lambda: "stopped" in process_state(ranks[-1].pid))
            ranks[0].wait()
            os.kill(ranks[-1].pid, signal.SIGCONT)
        statuses = [rank.wait() for rank in ranks]
        outputs = [rank.output() for rank in ranks]
    for pattern, output in zip((fault.first_output, fault.last_output), (outputs[0], outputs[-1]), strict=True):
        # torch may begin the lines of an error with the rank, such as "[rank1]: ".
        text = re.sub(r"^(\[rank\d+\]: )+", "", output, flags=re.MULTILINE)
        assert re.search(pattern, text), text
    assert statuses.count(0) == fault.num_successful


# Two hosts, which are network namespaces of this host.


def ip(arguments: str) -> str:
    return subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True).stdout


class Host:
    """A network namespace with a host name. `names` is the /etc/hosts of all hosts."""

    def __init__(self, index: int, folder: Path) -> None:
        self.name, self.address = f"host{index}", f"10.213.0.{1 + index}"
        self.namespace = f"syncbn-{os.getpid()}-{index}"
        self.log, self.names, self.torchrun = folder / f"log of {self.name}", folder / "names", None

    def start(self, *job: object) -> None:
        """Run the command of docs/training_script.md for several hosts, which is the same on each host."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "job"]
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *rendezvous, *map(str, job)]
        set_names = f'hostname {self.name} && mount --bind "{self.names}" /etc/hosts && exec "$@"'
        on_host = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c", set_names, "sh"]
        with self.log.open("w") as log:
            self.torchrun = subprocess.Popen([*on_host, *torchrun], env=ENVIRONMENT, stdout=log, stderr=log)

    def remove(self) -> None:
        """Remove the namespace, and kill the processes in it."""
        for process in ip(f"netns pids {self.namespace}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if self.torchrun is not None:
            self.torchrun.wait()
        ip(f"netns del {self.namespace}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Create two hosts with a link between their interfaces eth0."""
    first, second = hosts = [Host(index, tmp_path) for index in range(2)]
    first.names.write_text("".join(f"{host.address} {host.name}\n" for host in hosts) + "127.0.0.1 localhost\n")
    with contextlib.ExitStack() as stack:
        try:
            for host in hosts:
                ip(f"netns add {host.namespace}")
                stack.callback(host.remove)
            ip(f"link add eth0 netns {first.namespace} type veth peer eth0 netns {second.namespace}")
            for host in hosts:
                ip(f"-n {host.namespace} addr add {host.address}/24 dev eth0")
                ip(f"-n {host.namespace} link set eth0 up")
                ip(f"-n {host.namespace} link set lo up")
        except (OSError, subprocess.CalledProcessError) as error:  # OSError: `ip` of iproute2 is not installed.
            pytest.skip(f"network namespaces cannot be created here: {getattr(error, 'stderr', error)}")
        yield hosts


def test_two_hosts_report_that_their_link_is_cut(hosts: list[Host], tmp_path: Path) -> None:
    """The host of the store reports the age of the other ranks' positions. The other host cannot reach the store, and
    torchrun on that host still waits for the store."""
    for host in hosts:
        host.start(JOB, "link cut", tmp_path)
    wait_until(lambda: len([*tmp_path.glob("rank ?")]) == 4, lambda: str([host.log.read_text() for host in hosts]))
    ip(f"-n {hosts[0].namespace} link set eth0 down")
    (tmp_path / "cut").touch()
    # The four ranks have ended when only torchruns remain.
    wait_until(lambda: all("torch.distributed.run" in command for command in processes_with(tmp_path).values()))
    assert hosts[0].torchrun.wait() != 0
    expected = (
        r"syncbn: a collective failed on rank [01] after \d+.\d s.\n"
        r"(.*ranks? [01].*: in body.bn1 forward, call 3(; .*)?\n)+"
        r"(.*ranks? [23].*: last seen after body.bn1 backward, call 2; written \S+ s ago\n)+"
        r"(.*\n)+.*The process group reports",
        r"syncbn: a collective failed on rank ([23]) after \d+.\d s.\n"
        r"(.*ranks? [0-3, -]+: not known, as the process group's store does not answer\n)"
        r".*rank \1: in body.bn1 forward, call 3(; .*)?\n",
    )
    for host, pattern in zip(hosts, expected, strict=True):
        assert re.search(pattern, host.log.read_text()), host.log.read_text()


# Jobs that continue from their checkpoint.


def digits(folder: Path, steps: int, epochs: int = 2) -> list[object]:
    """Return the command of examples/digits.py for epochs of `steps` steps, with a checkpoint after each step."""
    settings = ["--epochs", epochs, "--steps", steps, "--width", 4, "--checkpoint-every", 1]
    return [EXAMPLES / "digits.py", *settings, "--output", folder, "--checkpoint", folder / "checkpoint.pt"]


def load_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def num_steps(folder: Path) -> int:
    """Return the number of steps in the checkpoint, or 0 without a checkpoint."""
    if not (folder / "checkpoint.pt").exists():
        return 0
    return len(load_checkpoint(folder)["trainers"]["syncbn"]["losses"])


def test_a_job_killed_at_random_moments_ends_with_the_checkpoint_of_an_uninterrupted_job(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Weights, buffers, losses and the order of the batches of two ranks are equal bit for bit."""
    num_kills, chance = pytestconfig.getoption("--kills"), random.Random(0)
    killed, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    steps = 8 * num_kills  # The job then lasts until the last kill.
    torchrun = torch.distributed.run.__file__, "--standalone", "--nproc-per-node", 2, "--max-restarts", num_kills
    # Restarts that share a store read the addresses of killed ranks: https://github.com/pytorch/pytorch/issues/135712
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    steps_at_kills = [0]
    with Script(*torchrun, *digits(killed, steps), **variables) as job:
        for kill in range(num_kills):
            in_restart = kill % 2 == 1  # Every second kill comes in a restart, which takes longer than a step.
            if not in_restart:
                wait_until(lambda: num_steps(killed) > steps_at_kills[-1])
            time.sleep(chance.uniform(0, 3 if in_restart else 0.5))
            ranks = list[int]()
            while not ranks:
                assert job.poll() is None, "the job ended before the last kill: give it more steps"
                ranks = [*processes_with(killed)]
            os.kill(chance.choice(ranks), signal.SIGKILL)
            steps_at_kills.append(num_steps(killed))
        assert job.wait() == 0, job.output()[-3000:]
    run_on_ranks(2, *digits(uninterrupted, steps))
    assert steps_at_kills == sorted(steps_at_kills)  # No checkpoint is lost.
    assert num_steps(killed) == 2 * steps
    torch.testing.assert_close(load_checkpoint(killed), load_checkpoint(uninterrupted), rtol=0, atol=0)


def test_two_ranks_continue_the_job_of_three_with_the_same_batch_size(tmp_path: Path) -> None:
    run_on_ranks(3, *digits(tmp_path, 10, epochs=1))
    run_on_ranks(2, *digits(tmp_path, 10, epochs=2))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert load_checkpoint(tmp_path)["batch"] == 6  # Three ranks began with 2 images each.
    assert len(metrics["runs"]["syncbn"]["losses"]) == 20
    assert metrics["runs"]["syncbn"]["distance"] < 1e-11  # from the losses of one process: rounding of float64
