"""Tests that two hosts (network namespaces of this host) train as one, and report a link that is cut."""

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
from jobs import ENVIRONMENT, TORCHRUN, processes_with, run_on_ranks

JOB = Path(__file__).with_name("faulty_job.py")


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
            self.agent = subprocess.Popen(
                command, env=ENVIRONMENT | {"COLLECTIVE_SECONDS": "5"}, stdout=log, stderr=log
            )

    def remove(self) -> None:
        """Remove the namespace and kill the processes in it."""
        for process in ip(f"netns pids {self.namespace}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()
        ip(f"netns del {self.namespace}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Create two hosts with a link between them."""
    if shutil.which("ip") is None:
        pytest.skip("ip, of the package iproute2, is not installed")
    hosts = [Host(index, tmp_path_factory.mktemp("hosts")) for index in range(2)]
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


Job = tuple[Path, list[Host]]


@pytest.fixture(scope="module")
def job(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run a job on the hosts, and cut the link in the third step. Return the folder of the job, and the hosts."""
    folder = tmp_path_factory.mktemp("job")
    for host in hosts:
        host.start(JOB, "link cut", folder)
    while len(list(folder.glob("rank ?"))) < 4:  # until the third step
        assert all(host.agent.poll() is None for host in hosts), [host.log.read_text() for host in hosts]
        time.sleep(0.1)
    ip(f"-n {hosts[0].namespace} link set {hosts[0].link} down")
    (folder / "cut").touch()
    while any("torch.distributed.run" not in command for command in processes_with(folder).values()):
        time.sleep(0.1)
    return folder, hosts


def test_two_hosts_train_as_one(job: Job, tmp_path: Path) -> None:
    run_on_ranks(4, JOB, "none", tmp_path)
    for rank in range(4):
        one_host, two_hosts = (torch.load(folder / f"rank {rank}") for folder in (tmp_path, job[0]))
        torch.testing.assert_close(two_hosts, one_host, rtol=0, atol=0)


def test_both_hosts_report_a_cut_link(job: Job) -> None:
    """The host of the store reports the age of the other ranks' positions; the other host reports a lost store."""
    host, other_host = job[1]
    assert host.agent.wait() != 0
    output = host.log.read_text()
    assert re.search(
        r"syncbn: a collective failed on rank [01] after \d+.\d s.\n"
        r"(.*ranks? [01].*: in body.bn1 forward, call 3(; .*)?\n)+"
        r"(.*ranks? [23].*: last seen after body.bn1 backward, call 2; written \S+ s ago\n)+"
        r"(.*\n)+.*The process group reports",
        output,
    ), output
    output = other_host.log.read_text()  # torchrun on this host still waits for the other host
    assert re.search(
        r"syncbn: a collective failed on rank ([23]) after \d+.\d s.\n"
        r"(.*ranks? [0-3, -]+: not known, as the process group's store does not answer\n)"
        r".*rank \1: in body.bn1 forward, call 3(; .*)?\n",
        output,
    ), output
