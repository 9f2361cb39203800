"""Tests that two hosts (network namespaces of this host) train as one, and report a link that is cut."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, EXAMPLES, TORCHRUN, processes_with, run_on_ranks

COLLECTIVES = {"COLLECTIVE_SECONDS": "8"}  # read by faulty_job.py
SETTINGS = ["--epochs", "1", "--steps", "20", "--width", "4"]


def ip(arguments: str) -> str:
    return subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True).stdout


class Host:
    """A network namespace with a host name, which `ip netns exec` resolves by the namespace's own hosts file."""

    def __init__(self, index: int, folder: Path) -> None:
        self.name, self.address = f"host{index}", f"10.213.0.{1 + index}"
        self.namespace, self.link = f"syncbn-{os.getpid()}-{index}", f"sb{os.getpid()}-{index}"
        self.log, self.agent = folder / f"log of {self.name}", None

    def start(self, *job: object) -> None:
        """Run the command of docs/training_script.md for several hosts, which is the same on each host."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "job"]
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *rendezvous, *map(str, job)]
        rename = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        with self.log.open("w") as log:
            command = ["ip", "netns", "exec", self.namespace, *rename, *torchrun]
            self.agent = subprocess.Popen(command, env=ENVIRONMENT | COLLECTIVES, stdout=log, stderr=log)

    def finish(self) -> tuple[int, str]:
        """Wait for the end of the job and return its exit status and output."""
        return self.agent.wait(), self.log.read_text()

    def remove(self) -> None:
        """Remove the namespace and kill the processes in it."""
        for process in ip(f"netns pids {self.namespace}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()
        ip(f"netns del {self.namespace}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Create two hosts with a link between them."""
    if shutil.which("ip") is None:
        pytest.skip("ip, of the package iproute2, is not installed")
    hosts = [Host(index, tmp_path) for index in range(2)]
    names = "\n".join(["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)])
    with contextlib.ExitStack() as stack:
        try:
            for host in hosts:
                ip(f"netns add {host.namespace}")
                stack.callback(host.remove)
                files = Path("/etc/netns") / host.namespace  # `ip netns exec` mounts these files over those in /etc
                files.mkdir(parents=True)
                stack.callback(shutil.rmtree, files)
                (files / "hosts").write_text(names)
            ip(f"link add name {hosts[0].link} type veth peer name {hosts[1].link}")
            for host in hosts:
                ip(f"link set {host.link} netns {host.namespace}")
                ip(f"-n {host.namespace} addr add {host.address}/24 dev {host.link}")
                for link in (host.link, "lo"):
                    ip(f"-n {host.namespace} link set {link} up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be created here: {getattr(error, 'stderr', error)}")
        yield hosts


def test_two_hosts_train_as_one(hosts: list[Host], tmp_path: Path) -> None:
    folders = tmp_path / "one host", tmp_path / "two hosts"
    run_on_ranks(4, EXAMPLES / "digits.py", *SETTINGS, "--output", folders[0])
    for host in hosts:
        host.start(EXAMPLES / "digits.py", *SETTINGS, "--output", folders[1])
    for host in hosts:
        status, output = host.finish()
        assert status == 0, output
    one_host, two_hosts = (json.loads((folder / "metrics.json").read_text())["runs"] for folder in folders)
    assert one_host == two_hosts


def test_both_hosts_report_a_cut_link(hosts: list[Host], tmp_path: Path) -> None:
    """The host of the store reports the age of the other ranks' positions; the other host reports a lost store."""
    for host in hosts:
        host.start(Path(__file__).with_name("faulty_job.py"), "link cut", tmp_path)
    while len(list(tmp_path.glob("rank ?"))) < 4:  # until the third step
        assert all(host.agent.poll() is None for host in hosts), [host.log.read_text() for host in hosts]
        time.sleep(0.1)
    ip(f"-n {hosts[0].namespace} link set {hosts[0].link} down")
    (tmp_path / "cut").touch()
    while any("torch.distributed.run" not in command for command in processes_with(tmp_path).values()):
        time.sleep(0.1)
    status, output = hosts[0].finish()
    assert status
    assert re.search(
        r"syncbn: a collective failed on rank [01] after \d+.\d s.\n"
        r"(.*ranks? [01].*: in body.bn1 forward, call 3(; .*)?\n)+"
        r"(.*ranks? [23].*: last seen after body.bn1 backward, call 2; written \S+ s ago\n)+"
        r"(.*\n)+.*The process group reports",
        output,
    ), output
    output = hosts[1].log.read_text()  # torchrun on this host still waits for the other host
    assert re.search(
        r"syncbn: a collective failed on rank ([23]) after \d+.\d s.\n"
        r"(.*ranks? [0-3, -]+: not known, as the process group's store does not answer\n)"
        r".*rank \1: in body.bn1 forward, call 3(; .*)?\n",
        output,
    ), output
