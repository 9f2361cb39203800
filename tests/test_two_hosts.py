"""Two hosts, which are network namespaces of this one: training over them, and the link between them cut in a step."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, EXAMPLES, TORCHRUN, processes_with, run_on_ranks

SETTINGS = ["--epochs", "1", "--steps", "20", "--width", "4"]
CUT_LINK_JOB = Path(__file__).with_name("cut_link_job.py")


class Host:
    """A network namespace with a name of its own, which `ip netns exec` finds in a hosts file of its own."""

    def __init__(self, index: int) -> None:
        self.name = f"host{index}"
        self.namespace = f"syncbn-{os.getpid()}-{index}"
        self.link = f"sb{os.getpid()}-{index}"
        self.address = f"10.213.0.{1 + index}"
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *job: object) -> None:
        """The line of docs/tutorial.md for several hosts, the same on each."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "job"]
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *rendezvous, *map(str, job)]
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.namespace, *named, *torchrun]
        self.agents.append(
            subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )

    def finish(self, seconds: float) -> tuple[int | None, str]:
        """The exit status of what was started, and what it has printed; after so many seconds it is killed."""
        agent = self.agents.pop()
        try:
            said, _ = agent.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            agent.kill()
            said, _ = agent.communicate()
            return None, said
        return agent.returncode, said

    def remove(self) -> None:
        """With all that runs there."""
        for process in ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        for agent in self.agents:
            agent.communicate()
        ip("netns", "del", self.namespace)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two, with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("ip, of the package iproute2, is not installed")
    both = one, other = Host(0), Host(1)
    names = "".join(f"{host.address} {host.name}\n" for host in both)
    with ExitStack() as stack:
        try:
            for host in both:
                ip("netns", "add", host.namespace)
                stack.callback(host.remove)
                files = Path("/etc/netns") / host.namespace  # which `ip netns exec` lays over those in /etc
                files.mkdir(parents=True)
                stack.callback(shutil.rmtree, files)
                (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            ip("link", "add", "name", one.link, "type", "veth", "peer", "name", other.link)
            for host in both:
                ip("link", "set", host.link, "netns", host.namespace)
                for words in (
                    f"addr add {host.address}/24 dev {host.link}",
                    f"link set {host.link} up",
                    "link set lo up",
                ):
                    ip("-n", host.namespace, *words.split())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
        yield both


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def test_trains_as_one_host(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    one_host = tmp_path / "one host"
    run_on_ranks(4, EXAMPLES / "digits.py", *SETTINGS, "--output", one_host)
    two_hosts = tmp_path / "two hosts"
    for host in hosts:
        host.start(EXAMPLES / "digits.py", *SETTINGS, "--output", two_hosts)
    for host in hosts:
        status, said = host.finish(200)
        assert status == 0, said
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (one_host, two_hosts)]
    assert metrics[0]["runs"] == metrics[1]["runs"]


def test_cut_link(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The side that has the store finds who is silent; the other says that it is cut off."""
    for host in hosts:
        host.start(CUT_LINK_JOB, tmp_path, EXAMPLES / "digits.py", *SETTINGS, "--timeout", 8, "--output", tmp_path)
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("rank ?"))) < 4:
        assert time.monotonic() < deadline, "the ranks have not come to the third step"
        time.sleep(0.1)
    ip("-n", hosts[0].namespace, "link", "set", hosts[0].link, "down")
    (tmp_path / "cut").touch()
    while any("torch.distributed.run" not in command for command in processes_with(tmp_path).values()):
        assert time.monotonic() < deadline, "a rank has not ended"
        time.sleep(0.1)
    status, said = hosts[0].finish(200)
    assert status
    assert re.search(
        r"syncbn: a collective failed on rank [01] after \d+.\d s.\n.*"
        r"ranks 0-1: in 4.bn1 forward, call 3(; .*)?\n"
        r".*(ranks 2-3|rank 2: after (?P<place>.*); not heard of for \d+ s\n.*rank 3): after (?(place)(?P=place)|.*); "
        r"not heard of for \d+ s\n",
        said,
    ), said
    _, said = hosts[1].finish(0)  # its torchrun waits on, as it has not heard that the link is cut
    assert re.search(
        r"syncbn: a collective failed on rank ([23]) after \d+.\d s.\n.*rank \1: in 4.bn1 forward, call 3\n"
        r".*: not known, as the process group's store has not answered for 5 s \(ranks 0-1: on other hosts\)\n",
        said,
    ), said
