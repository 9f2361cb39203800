"""Catches a plugin for Lightning with which its Trainer, on two processes, trains otherwise than one process."""

import tomllib
from pathlib import Path

import pytest
import torch
from jobs import run_script, run_text

pytest.importorskip("lightning", reason="lightning is not installed (pip install syncbn[lightning])")

ROOT = Path(__file__).parents[1]
WITHOUT_SYNCBN = """
import sys
sys.modules["syncbn"] = None
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
state = torch.load(sys.argv[1], weights_only=True)["state_dict"]
net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
"""


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    for devices in (1, 2):
        run_script(Path(__file__).with_name("lightning_job.py"), devices, tmp_path)
    one, two = (torch.load(tmp_path / f"{devices}.pt") for devices in (1, 2))
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=1e-12, atol=1e-12)
    assert (one["seen"], one["after"]) == (["BatchNorm1d"], "BatchNorm1d")
    assert (two["seen"], two["after"]) == (["SyncBatchNorm1d"], "BatchNorm1d")
    run_text(WITHOUT_SYNCBN, two["checkpoint"])


@pytest.fixture
def entry_points(tmp_path: Path) -> Path:
    """A folder for the front of sys.path where syncbn's entry points are, in place of those of an installed syncbn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (folder := tmp_path / "syncbn-0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: syncbn\nVersion: 0\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in targets.items())
        for group, targets in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(sections))
    return tmp_path


def test_a_strategy_that_does_not_call_the_plugin(tmp_path: Path, entry_points: Path) -> None:
    """Its ranks would train local batch norm, and nothing would say so."""
    job = Path(__file__).with_name("lightning_job.py")
    text = run_script(job, 2, tmp_path, entry_points, status=1)
    assert "ModelParallelStrategy does not call SyncBatchNormPlugin" in text
    assert "1 BatchNorm1d (net.1): call syncbn.convert_syncbn_model(model) in configure_model" in text


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_takes_the_plugin_and_checks_it(package: str, entry_points: Path) -> None:
    """Of either package: their classes are two copies. It asks for layers that train and can be converted, and only
    where the Trainer has the plugin."""
    pytest.importorskip(package.partition(".")[0])
    code = f"""
import sys
sys.path.insert(0, {str(entry_points)!r})
from {package} import Trainer
from {package}.strategies import ModelParallelStrategy
from syncbn import SyncBatchNorm1d, convert_syncbn_model
from syncbn.lightning import SyncBatchNormCheck, SyncBatchNormPlugin
from torch.nn import BatchNorm1d, Sequential

def trainer_of(strategy, *plugins):
    return Trainer(strategy=strategy, accelerator="cpu", devices=2, plugins=[*plugins], logger=False)

def starts(model, *plugins):
    trainer = trainer_of(ModelParallelStrategy(), *plugins)
    (check,) = (callback for callback in trainer.callbacks if isinstance(callback, SyncBatchNormCheck))
    try:
        check.on_train_start(trainer, model)
    except RuntimeError:
        return False
    return True

assert not starts(Sequential(BatchNorm1d(3)), SyncBatchNormPlugin())
assert starts(Sequential(BatchNorm1d(3)))
assert starts(Sequential(BatchNorm1d(3)).eval(), SyncBatchNormPlugin())
assert starts(convert_syncbn_model(Sequential(BatchNorm1d(3))), SyncBatchNormPlugin())

plugin = SyncBatchNormPlugin(process_group=2, channel_last=True)
assert trainer_of("ddp", plugin).strategy._layer_sync is plugin
model = plugin.apply(Sequential(BatchNorm1d(3), convert_syncbn_model(BatchNorm1d(3))))
assert [type(layer) for layer in model] == [SyncBatchNorm1d, SyncBatchNorm1d]
assert (model[0].process_group, model[0].channel_last) == (2, True)
assert [type(layer) for layer in plugin.revert(model)] == [BatchNorm1d, SyncBatchNorm1d]
"""
    run_text(code)
