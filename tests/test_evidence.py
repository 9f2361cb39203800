"""Catches a job of examples/evidence/ that fails with tiny settings on 2 ranks, or trains other than it says.

Also a claim of README.md on segmentation that is not what is committed.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from jobs import EXAMPLES, run_job

SEGMENTATION = EXAMPLES / "evidence" / "segmentation_seeds.json"


def run_evidence(name: str, output: Path, *settings: object) -> tuple[str, dict[str, Any]]:
    """What a job prints, and its metrics; with one seed."""
    text, metrics = run_job(output, EXAMPLES / "evidence" / f"{name}.py", "--seeds", 1, *settings)
    assert metrics["ranks"] == 2
    assert all(0 < error < 100 for way in metrics["test errors in %"].values() for (error,) in way.values())
    assert (output / "errors.png").stat().st_size > 5_000
    return text, metrics


def test_images_per_rank(tmp_path: Path) -> None:
    text, metrics = run_evidence("images_per_rank", tmp_path, "--images", 4, "--epochs", 1)
    errors = {way["4"][0] for way in metrics["test errors in %"].values()}
    assert len(errors) == 3, "from the same weights on the same batches: what is the same was trained the same way"
    assert "layers that gain" in text
    assert [layer["values_per_rank"] for layer in metrics["local noise"]["4"]] == [256, *[64] * 3, *[16] * 3]


def test_sorted_shards(tmp_path: Path) -> None:
    _, metrics = run_evidence("sorted_shards", tmp_path, "--epochs", 2)
    errors = {way: of_shards["sorted"][0] for way, of_shards in metrics["test errors in %"].items()}
    assert errors.keys() == {"local", "local, merged", "local, recomputed", "syncbn"}
    assert errors["syncbn"] < errors["local"]
    assert len(set(errors.values())) == 4
    noise = {kind: max(one["output_deviation"] for one in layers) for kind, layers in metrics["local noise"].items()}
    assert noise["shuffled"] < noise["sorted"]


def test_population_statistics(tmp_path: Path) -> None:
    _, metrics = run_evidence("population_statistics", tmp_path, "--epochs", 2, "--batches", 60)
    moving, recomputed = metrics["test errors in %"].values()
    assert recomputed["1"][0] < 0.7 * moving["1"][0], "10 steps do not fill a moving average"
    assert recomputed.keys() == moving.keys() == {"1", "2"}


def test_padded_sequences(tmp_path: Path) -> None:
    _, metrics = run_evidence("padded_sequences", tmp_path, "--epochs", 1, "--shares", 90)
    errors = metrics["test errors in %"]
    # float64 roundings of 1e-16, which 16 steps of training make larger, by far less than this.
    assert metrics["largest distance of the losses with a mask from those without padding"] < 1e-11
    assert errors["alone"] == errors["padded, mask"]
    assert errors["padded, no mask"] != errors["alone"]


def test_uneven_data(tmp_path: Path) -> None:
    _, metrics = run_evidence("uneven_data", tmp_path, "--epochs", 1, "--shares", 90)
    errors = metrics["test errors in %"]
    assert metrics["steps"] == {"empty batches": {"90 %": 67}, "drop": {"90 %": 7}, "drop, as many steps": {"90 %": 67}}
    assert errors["empty batches"]["90 %"] < errors["drop"]["90 %"]
    assert errors["empty batches"] != errors["drop, as many steps"]


def test_segmentation_seeds(tmp_path: Path) -> None:
    script = EXAMPLES / "evidence" / "segmentation_seeds.py"
    settings = ("--seeds", 2, "--steps", 5, "--width", 4, "--test-scenes", 4)
    output, metrics = run_job(tmp_path, script, *settings, file=SEGMENTATION.name)
    assert metrics["ways"].keys() == {"one process", "syncbn", "local"}
    assert all(seed["largest distance"] < 1e-11 for seed in metrics["ways"]["syncbn"])
    assert all(seed["largest distance"] > 1e-3 for seed in metrics["ways"]["local"])
    assert len({seed["final loss"] for seed in metrics["ways"]["one process"]}) == 2, "each seed has its own weights"
    assert "2 seeds" in output
    assert all((tmp_path / f"segmentation_{name}.png").stat().st_size > 10_000 for name in ("scenes", "seeds"))


def test_the_committed_segmentation_is_what_the_first_page_says() -> None:
    ways = json.loads(SEGMENTATION.read_text())["ways"]
    page = (EXAMPLES.parent / "README.md").read_text()
    for way, seeds in ways.items():
        assert len(seeds) >= 5
        scores = [100 * seed["mean_iou"] for seed in seeds]
        assert f"{statistics.mean(scores):.0f} ± {statistics.stdev(scores):.0f}" in page, way
    assert f"{max(seed['largest distance'] for seed in ways['syncbn']):.1e}".replace("e-0", "e-") in page
    for alone, synchronised, local in zip(*ways.values(), strict=True):
        assert synchronised["largest distance"] < 1e-6
        assert abs(synchronised["mean_iou"] - alone["mean_iou"]) < 1e-3
        assert local["mean_iou"] < alone["mean_iou"] - 0.05


def test_rounding(tmp_path: Path) -> None:
    script = EXAMPLES / "evidence" / "rounding.py"
    _, metrics = run_job(tmp_path, script, "--seeds", 1, "--steps", 3)
    largest = metrics["largest difference of each step"]
    assert max(largest["float64"]["syncbn"]) < 1e-13
    assert all(len(steps) == 3 for names in largest.values() for steps in names.values())
    assert max(largest["float64"]["local"]) > 1e-3
