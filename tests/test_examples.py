"""Catches an example or benchmark that fails with tiny settings, does not learn, or writes wrong figures."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.page import MARKS
from jobs import ENVIRONMENT, EXAMPLES, ON_TWO_RANKS, processes_with, run, run_job, run_on_ranks, run_script

SCRIPTS = EXAMPLES.parent / "scripts"


def test_digits_on_two_ranks(tmp_path: Path) -> None:
    output, metrics = run_job(tmp_path, EXAMPLES / "digits.py", "--epochs", 1, "--steps", 30)
    assert "synchronised over 2 ranks" in output
    runs = metrics["runs"]
    assert {len(one["losses"]) for one in runs.values()} == {30}
    # float64 roundings of 1e-16 grow in 30 steps of training, by far less than this.
    assert runs["syncbn"]["distance"] < 1e-11
    assert runs["syncbn"]["accuracies"] == runs["one process"]["accuracies"]
    assert runs["local"]["distance"] > 1e-2
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_digits_on_one_process_without_rich_and_matplotlib(tmp_path: Path) -> None:
    code = "import runpy, sys; sys.modules['rich'] = sys.modules['matplotlib'] = None; sys.argv.pop(0)"
    code += f"; sys.path[0] = {str(EXAMPLES)!r}"
    script = EXAMPLES / "digits.py"
    settings = (script, "--epochs", 1, "--steps", 60, "--images-per-rank", 8, "--output", tmp_path)
    output = run(sys.executable, "-c", f"{code}; runpy.run_path({str(script)!r}, run_name='__main__')", *settings)
    assert "epoch 1/1  one process" in output
    assert "no picture" in output
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.json"]
    runs = json.loads((tmp_path / "metrics.json").read_text())["runs"]
    assert runs["syncbn"]["distance"] < 1e-11
    assert runs["local"]["distance"] == 0  # the same program as one process
    losses = runs["one process"]["losses"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), "it does not learn"


def test_wgan_gp_on_two_ranks(tmp_path: Path) -> None:
    """The penalty's second derivatives are one process's; a few steps already bring the samples nearer to digits."""
    _, metrics = run_job(tmp_path, EXAMPLES / "wgan_gp.py", "--steps", 30)
    assert metrics["distance of the critic's gradients from one process"] < 1e-12
    kinds = ("a real one", "a generated one", "a random image")
    real, generated, random = (metrics[f"nearest real digit, from {kind}"] for kind in kinds)
    assert real < generated < 0.8 * random
    assert (tmp_path / "samples.png").stat().st_size > 10_000


def test_local_noise() -> None:
    output = run_script(EXAMPLES / "local_noise.py", "--ranks", 2, "--steps", 2)
    assert all(said in output for said in ("4.shortcut.1", "2 ranks: layers that gain", "0 of 7"))


def test_bench_on_two_ranks(tmp_path: Path) -> None:
    settings = ("--rounds", 2, "--dtypes", "float32", "bfloat16", "--shapes", "4x8x6x6", "2x7x12")
    _, results = run_job(tmp_path, SCRIPTS / "bench.py", *settings, file="bench.json")
    times = {(row["case"], row["peer"]): row for row in results["times"]}
    cases = {case for case, _ in times}
    assert len(cases) == (2 + 1) * 2  # layouts of each shape, times dtypes
    assert all(row["both"] > row["forward"] > 0 for row in times.values())
    for case in cases:
        peers = {peer for other, peer in times if other == case}
        assert {"syncbn fused", "hand-written fused", "two all_reduces"} <= peers
        assert [times[case, peer]["collectives"] for peer in ("syncbn", "nn.BatchNorm")] == [2, 0]
        assert times[case, "syncbn"]["peak"] >= 2, "the output and the gradient of the input"


def test_bench_steps_on_two_ranks(tmp_path: Path) -> None:
    models, settings = ("segmentation", "block"), ("--rounds", 1, "--scale", 0.15, "--channels-last")
    _, results = run_job(tmp_path, SCRIPTS / "bench.py", "steps", *settings, "--models", *models, file="steps.json")
    for model in models:
        assert results["times"][model].keys() == {"nn.BatchNorm", "syncbn", "hand-written"}
        assert all(0 < one["forward"] < one["both"] for one in results["times"][model].values())


def test_bench_writes_its_page(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(f"before\n{MARKS[0]}old\n{MARKS[1]}behind\n")
    (tmp_path / "static").mkdir()
    settings = "--dtypes", "float32", "--shapes", "4x8x6x6", "--models", "segmentation", "--scale", 0.15
    run_script(SCRIPTS / "bench.py", "page", "--rounds", 2, *settings, "--output", tmp_path, "--page", page)
    text = page.read_text()
    assert text.startswith(f"before\n{MARKS[0]}")
    assert text.endswith(f"{MARKS[1]}behind\n")
    assert "old" not in text
    rows = re.findall(r"^\| 4x8x6x6 float32 (?:contiguous|channels last)(?: \| \d+\.\d){3} \|$", text, re.MULTILINE)
    assert len(rows) == 2
    assert re.search(r"^\| U-Net, 2 images a rank(?: \| \d+\.\d\d){2} \|$", text, re.MULTILINE)
    assert (tmp_path / "static" / "speed.png").stat().st_size > 10_000


def test_bench_of_the_hosts_time() -> None:
    output = run_on_ranks(2, SCRIPTS / "bench.py", "overhead", "--rounds", 2, "--steps", 3)
    rows = re.findall(r"^(\w.*\w) +-?[\d.]+ us$", output, re.MULTILINE)
    assert rows == ["synchronised", "alone", "two all_reduces", "overhead"]
    pytest.importorskip("triton")
    output = run_script(SCRIPTS / "bench.py", "launches", "--rounds", 1)
    rows = re.findall(r"^(.*\w) +forward +[\d.]+ us   backward +[\d.]+ us$", output, re.MULTILINE)
    assert rows == ["nn.BatchNorm2d, on the CPU", "syncbn", "syncbn with a group"]


def test_bench_kernels(tmp_path: Path) -> None:
    settings = ("--shapes", "4x8x6x6", "--rounds", 2, "--output", tmp_path)
    output = run_script(SCRIPTS / "bench.py", "kernels", *settings)
    assert output.count("4 x.sum() and 2 copies / the four functions: ") == 4
    cases = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    assert len(cases) == 2 * 2  # dtypes, layouts
    functions = {"forward_sums", "forward_outputs fused", "backward_sums", "backward_outputs fused"}
    assert all(functions <= kernels.keys() for kernels in cases.values())


def test_scaling_on_two_ranks(tmp_path: Path) -> None:
    script = SCRIPTS / "scaling.py"
    sent = run_job(tmp_path, script, "--rounds", 3, file="ranks-2.json")[1]["sent"]
    # On 2 ranks each of them sends its payload once; gloo adds headers.
    payloads = {"syncbn": 8 * (4 * 256 + 1), "torch": 4 * (4 * 256 + 1), "apex": 4 * 4 * 256}
    for scheme, payload in payloads.items():
        assert payload < sent[scheme]["bytes"] < 2 * payload
    assert sent["syncbn"]["messages"] < sent["torch"]["messages"] < sent["apex"]["messages"]

    times = [  # as the rings of a network with these constants take
        {"collective": kind, "ranks": 4, "bytes": num_bytes, "seconds": messages * 1e-4 + sent * num_bytes / 1e9}
        for kind, messages, sent in (("all_reduce", 6, 1.5), ("all_gather", 3, 3))
        for num_bytes in (1000, 1_000_000)
    ]
    (tmp_path / "ranks-2.json").write_text(json.dumps({"times": times}))
    run_script(script, "--output", tmp_path)
    fitted = json.loads((tmp_path / "model.json").read_text())["fitted"]
    assert fitted == pytest.approx({"latency": 1e-4, "bandwidth": 1e9})


def test_soak_on_two_ranks() -> None:
    output = run_on_ranks(2, SCRIPTS / "soak.py", "--minutes", 0.02)
    assert re.search(r"^([2-9]|\d\d+) rounds in .*\nrank 0: .*\nrank 1: ", output, re.MULTILINE)


def test_segmentation_on_two_ranks(tmp_path: Path) -> None:
    settings = ("--steps", 15, "--test-scenes", 7, "--width", 4)
    output, metrics = run_job(tmp_path, EXAMPLES / "segmentation.py", *settings)
    assert "synchronised over 2 ranks" in output
    runs = metrics["runs"]
    assert {len(one["losses"]) for one in runs.values()} == {15}
    assert runs["syncbn"]["distance"] < 1e-10 < 1e-2 < runs["local"]["distance"]
    assert runs["syncbn"]["mean_iou"] == pytest.approx(runs["one process"]["mean_iou"], abs=1e-3)
    assert (tmp_path / "predictions.png").stat().st_size > 10_000


def test_fsdp_digits_on_two_ranks(tmp_path: Path) -> None:
    _, metrics = run_job(tmp_path, EXAMPLES / "fsdp_digits.py", "--epochs", 1, "--steps", 30)
    assert (metrics["ranks"], metrics["steps"]) == (2, 30)
    assert metrics["largest distance from one process"] < 1e-11
    assert metrics["test accuracy"] == metrics["test accuracy of one process"]
    assert metrics["values of parameters on this rank"] < 0.6 * metrics["values of parameters of one process"]


def test_finetune_on_two_ranks(tmp_path: Path) -> None:
    _, metrics = run_job(tmp_path, EXAMPLES / "finetune.py", "--pretrain-steps", 60, "--steps", 20)
    accuracies = metrics["accuracies"]
    assert metrics["largest distance of syncbn from one process"] < 1e-11
    assert accuracies["syncbn"] == accuracies["one process"]
    assert accuracies["as it was, old images"] > 0.8
    assert accuracies["as it was"] < 0.3 < 0.5 < accuracies["recomputed"]
    assert accuracies["frozen"] < 0.3


def test_interrupting_digits_leaves_no_process(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"  # of the first step
    options = ["--epochs", "100", "--output", tmp_path, "--checkpoint", checkpoint, "--checkpoint-every", "1"]
    command = [*ON_TWO_RANKS, *map(str, (EXAMPLES / "digits.py", *options))]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, start_new_session=True) as process:
        while not checkpoint.exists():
            assert process.poll() is None
            time.sleep(0.1)
        assert len(processes_with(tmp_path)) == 3, "torchrun and two ranks"
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        process.communicate()
        assert process.returncode != 0
        assert processes_with(tmp_path) == {}
    assert not (tmp_path / "metrics.json").exists()
