"""Tests that two hosts train as one and report a link that is cut. The hosts are network namespaces of this host."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import ENVIRONMENT, TORCHRUN, processes_with, run_on_ranks, wait_until

JOB = Path(__file__).with_name("faulty_job.py")


def ip(arguments: str) -> str:
    return subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True).stdout


class Host:
    """A network namespace with a host name."""

    def __init__(self, index: int, folder: Path) -> None:
        self.name, self.address = f"host{index}", f"10.213.0.{1 + index}"
        self.namespace, self.interface = f"syncbn-{os.getpid()}-{index}", f"sb{os.getpid()}-{index}"
        self.log, self.torchrun = folder / f"log of {self.name}", None

    def start(self, *job: object) -> None:
        """Run the command of docs/training_script.md for several hosts, which is the same on each host."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "job"]
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *rendezvous, *map(str, job)]
        set_host_name = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.namespace, *set_host_name, *torchrun]
        with self.log.open("w") as log:
            self.torchrun = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)

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
    """Create two hosts with a link between them."""
    if shutil.which("ip") is None:
        pytest.skip("ip, of the package iproute2, is not installed")
    hosts = [Host(index, tmp_path) for index in range(2)]
    addresses = "\n".join(["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)])
    with contextlib.ExitStack() as stack:
        try:
            for host in hosts:
                ip(f"netns add {host.namespace}")
                stack.callback(host.remove)
                folder = Path("/etc/netns") / host.namespace
                folder.mkdir(parents=True)
                stack.callback(shutil.rmtree, folder)
                (folder / "hosts").write_text(addresses)  # `ip netns exec` mounts this file over /etc/hosts.
            first, second = hosts
            ends = f"{first.interface} netns {first.namespace} type veth peer {second.interface}"
            ip(f"link add {ends} netns {second.namespace}")
            for host in hosts:
                ip(f"-n {host.namespace} addr add {host.address}/24 dev {host.interface}")
                ip(f"-n {host.namespace} link set {host.interface} up")
                ip(f"-n {host.namespace} link set lo up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be created here: {getattr(error, 'stderr', error)}")
        yield hosts


def test_two_hosts_train_as_one_and_both_report_that_their_link_is_cut(hosts: list[Host], tmp_path: Path) -> None:
    """The host of the store reports the age of the other ranks' positions. The other host cannot reach the store, and
    torchrun on that host still waits for the store."""
    on_one_host, on_two_hosts = tmp_path / "one host", tmp_path / "two hosts"
    for folder in (on_one_host, on_two_hosts):
        folder.mkdir()
    for host in hosts:
        host.start(JOB, "link cut", on_two_hosts)
    while len(list(on_two_hosts.glob("rank ?"))) < 4:  # In the third step each rank saves the results of the second.
        assert all(host.torchrun.poll() is None for host in hosts), [host.log.read_text() for host in hosts]
        time.sleep(0.1)
    ip(f"-n {hosts[0].namespace} link set {hosts[0].interface} down")
    (on_two_hosts / "cut").touch()
    # The four ranks have ended when only torchruns remain.
    wait_until(lambda: all("torch.distributed.run" in command for command in processes_with(on_two_hosts).values()))
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
    run_on_ranks(4, JOB, "none", on_one_host)
    for rank in range(4):
        actual, reference = (torch.load(folder / f"rank {rank}") for folder in (on_two_hosts, on_one_host))
        torch.testing.assert_close(actual, reference, rtol=0, atol=0)
