"""Offers the conversion as a plugin of Lightning, https://lightning.ai/docs/pytorch/stable/extensions/plugins.html.

Installed, it also gives each Trainer a callback, by the entry points in pyproject.toml.
"""

import sys

from torch import nn

from syncbn.comm.groups import ProcessGroupLike
from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.layer import SyncBatchNorm
from syncbn.unsynchronised import CONVERT, description, unsynchronised

try:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.plugins.layer_sync import LayerSync
except ModuleNotFoundError as error:
    try:
        from pytorch_lightning import Callback, Trainer
        from pytorch_lightning.plugins.layer_sync import LayerSync
    except ModuleNotFoundError:
        raise ImportError(f'syncbn.lightning needs Lightning (pip install "lightning>=2.4"): {error}') from error


class SyncBatchNormPlugin(LayerSync):  # type: ignore[misc]
    """Makes the Trainer synchronise the batch norm of a model while it fits, and give the model back as it was.

        Trainer(strategy="ddp", devices=2, plugins=[SyncBatchNormPlugin()])

    Use it in place of `sync_batchnorm=True`, which takes torch.nn.SyncBatchNorm, never beside it. The layers are
    converted when the fit begins and reverted when it ends, so checkpoints, which have BatchNorm's keys anyway, and the
    fitted model need no syncbn. Validation inside the fit communicates nothing.

    Only the DDP and FSDP strategies call plugins of this kind. Under the others, such as ModelParallelStrategy and
    DeepSpeedStrategy, `SyncBatchNormCheck` raises an error: call `convert_syncbn_model` in configure_model there.

    Args:
        process_group, channel_last: as in `convert_syncbn_model`.
    """

    def __init__(self, process_group: ProcessGroupLike = None, channel_last: bool = False) -> None:
        self.process_group = process_group
        self.channel_last = channel_last
        self.converted: list[nn.Module] = []
        older = sys.modules.get("pytorch_lightning.plugins.layer_sync")  # the same package under its older name
        if older is not None:
            older.LayerSync.register(SyncBatchNormPlugin)

    def apply(self, model: nn.Module) -> nn.Module:
        """The Trainer calls this before it wraps the model. See `convert_syncbn_model`."""
        others = [module for module in model.modules() if not isinstance(module, SyncBatchNorm)]
        convert_syncbn_model(model, self.process_group, self.channel_last)
        self.converted = [module for module in others if isinstance(module, SyncBatchNorm)]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """The Trainer calls this after the fit. Layers that were synchronised before it stay so."""
        for layer in self.converted:
            revert_syncbn_model(layer)
        return model


class SyncBatchNormCheck(Callback):  # type: ignore[misc]
    """Raises RuntimeError, before the first step, where a strategy has not called the `SyncBatchNormPlugin` that its
    Trainer was given, and batch norm would stay local without a word.

    Each Trainer has one where syncbn is installed; without such a plugin it does nothing.
    """

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """The Trainer calls this when the strategy has set the model up."""
        plugin = getattr(trainer.strategy, "_layer_sync", None)
        if trainer.world_size > 1 and isinstance(plugin, SyncBatchNormPlugin):
            local = [row for row in unsynchronised(pl_module) if row.remedy == CONVERT and row.layer.training]
            if local:
                raise RuntimeError(
                    f"{type(trainer.strategy).__name__} does not call SyncBatchNormPlugin, so each rank would "
                    f"normalise its own batch: {description(local)} in configure_model, before the model is wrapped"
                )


def callbacks() -> list[SyncBatchNormCheck]:
    """Lightning's entry points for callbacks call this for each Trainer."""
    return [SyncBatchNormCheck()]
