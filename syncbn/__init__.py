"""Normalises on W ranks as on one: synchronised batch norm for PyTorch."""

from syncbn import functional, kernels
from syncbn.convert import convert_syncbn_model, revert_syncbn_model
from syncbn.layer import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from syncbn.reductions.debug_mode import debug
from syncbn.reductions.resolving import create_syncbn_process_group
from syncbn.tools.assert_synced import assert_synced
from syncbn.tools.join import join
from syncbn.tools.measure_local_noise import measure_local_noise
from syncbn.tools.merge_running_stats import merge_running_stats
from syncbn.tools.recompute_running_stats import recompute_running_stats
from syncbn.tools.running_stats import accumulate_running_stats
from syncbn.tools.summary import summary

__version__ = "0.1.0"  # pyproject.toml reads it here
__all__ = [
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "accumulate_running_stats",
    "assert_synced",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "debug",
    "functional",
    "join",
    "kernels",
    "measure_local_noise",
    "merge_running_stats",
    "recompute_running_stats",
    "revert_syncbn_model",
    "summary",
]
