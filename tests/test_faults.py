"""Catches a fault of the catalogue, faults.py, after which a rank hangs or does not say why it ends."""

import re
import signal
from pathlib import Path

import faults
import pytest
import torch
from jobs import ON_TWO_RANKS, run, start_ranks

from syncbn.ranks import positions, report

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the catalogue is of CPUs and gloo")


@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault(name: str) -> None:
    fault, (statuses, texts) = faults.FAULTS[name], faults.run(name)
    assert re.search(fault.said, texts[0]), texts[0]
    assert re.search(fault.said_at_fault, texts[-1]), texts[-1]
    assert [status == 0 for status in statuses] == [rank < fault.well for rank in range(fault.num_ranks)]


@pytest.mark.parametrize("fault", ["none", "none, DDP broadcasts buffers"])
def test_a_healthy_job_says_nothing(fault: str) -> None:
    assert faults.run(fault) == ([0, 0], ["", ""])


TOLD = [  # an error that ends a program, and whether it is a collective's
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
    (RuntimeError("Application timeout caused pair closure"), True),
    (RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors"), True),
    (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
    (RuntimeError("syncbn: a collective failed on rank 0 after 3.0 s.\n... [/pytorch/gloo/pair.cc:553]"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (FileNotFoundError("/data/gloo/image.png"), False),
    (RuntimeError("cannot read /data/gloo/image.png"), False),
]


@pytest.mark.parametrize(("error", "is_of_collective"), TOLD)
def test_errors_of_collectives_are_told_from_others(error: Exception, is_of_collective: bool) -> None:
    """A report follows them, with the line; and beside another rank's error they are consequences."""
    try:
        raise error
    except type(error):
        assert positions.failed_collective() is (error if is_of_collective else None)
        why = positions.exit_reason()
    assert report.is_consequence(why) == (is_of_collective or "syncbn" in str(error))


def test_under_torchrun() -> None:
    """It ends the other ranks, perhaps before they could speak; what started it is always said."""
    with pytest.raises(AssertionError, match="KeyError: 'no such class: 10'"):
        run(*ON_TWO_RANKS, faults.JOB, "exception in forward")


WITH_OWN_STORE = """
import time
import torch
import torch.distributed as dist
import syncbn
from syncbn.ranks.positions import ThisRank

of_test, rank, size = next(dist.rendezvous("env://"))
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_test.set("port", str(store.port))
else:
    store = dist.TCPStore("127.0.0.1", int(of_test.get("port")), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
layer = syncbn.SyncBatchNorm(3)
layer(torch.randn(4, 3))
if rank > 0:
    read = ThisRank.read
    ThisRank.read = lambda *arguments: (time.sleep(rank), read(*arguments))[1]
layer(torch.randn(4, 3 if rank < 2 else 2))
"""


def test_the_rank_that_has_the_store_leaves_last(tmp_path: Path) -> None:
    """It raises as all do, and would end at once, and with it what the others read late."""
    (program := tmp_path / "program.py").write_text(WITH_OWN_STORE)
    ranks, store = start_ranks(3, program)
    assert [rank.wait() != 0 for rank in ranks] == [True] * 3
    said = (
        "ValueError: syncbn: another rank failed in SyncBatchNorm forward, call 2.\nrank 2: ValueError: expected 3 ch"
    )
    for rank in ranks[:2]:
        assert said in re.sub(r"^(\[rank\d+\]: )+", "", rank.text(), flags=re.MULTILINE), rank.text()
    assert "ValueError: SyncBatchNorm: expected 3 channels" in ranks[2].text()
    del store


WITH_A_TIE = """
import torch
import torch.distributed as dist
from syncbn.functional import sync_batch_norm

dist.init_process_group("gloo")
x, weight = torch.randn(2, 4), torch.ones(3 if dist.get_rank() else 4)
sync_batch_norm(x, None, None, weight, training=True)
"""


def test_an_error_of_a_rank_that_gloo_ends(tmp_path: Path) -> None:
    """The arguments of rank 1 do not agree on the number of channels, so rank 1 joins the all_reduce with another size,
    and gloo aborts it. Rank 0 reports the error."""
    (program := tmp_path / "program.py").write_text(WITH_A_TIE)
    (healthy, faulty), store = start_ranks(2, program)
    assert healthy.wait() != 0
    assert faulty.wait() == -signal.SIGABRT, faulty.text()
    said = r"rank 1: (last seen )?in sync_batch_norm forward, call 1; .*has raised ValueError: expected 3 channels"
    assert re.search(said, healthy.text()), healthy.text()
    del store


WITH_NEW_PARTNER = """
import torch
import torch.distributed as dist
import syncbn
from syncbn.ranks import positions

of_test, process, _ = next(dist.rendezvous("env://"))
positions.default_store = lambda: of_test  # one for both groups, as torchrun's
positions.ThisRank.read = None
for number, processes in enumerate(([0, 1], [0, 2])):
    if process in processes:
        store, rank = dist.PrefixStore(f"group {number}", of_test), processes.index(process)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = syncbn.convert_syncbn_model(torch.nn.BatchNorm1d(3))
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
"""


def test_a_partner_whose_process_is_new(tmp_path: Path) -> None:
    """Its rank was another process's in the group before. No rank reads what that has written, and none warns."""
    (program := tmp_path / "program.py").write_text(WITH_NEW_PARTNER)
    processes, store = start_ranks(3, program)
    try:
        for process in processes:
            assert (process.wait(), process.text()) == (0, "")
    finally:
        for process in processes:
            process.kill()
        del store
