"""Offers synchronised batch norm for PyTorch: W ranks normalise their joint batch."""

from syncbn import functional as functional
from syncbn import kernels as kernels
from syncbn.convert import convert_syncbn_model as convert_syncbn_model
from syncbn.convert import revert_syncbn_model as revert_syncbn_model
from syncbn.layer import SyncBatchNorm as SyncBatchNorm
from syncbn.layer import SyncBatchNorm1d as SyncBatchNorm1d
from syncbn.layer import SyncBatchNorm2d as SyncBatchNorm2d
from syncbn.layer import SyncBatchNorm3d as SyncBatchNorm3d
from syncbn.layer import accumulate_running_stats as accumulate_running_stats
from syncbn.ranks.groups import create_syncbn_process_group as create_syncbn_process_group
from syncbn.summaries import summary as summary

__version__ = "0.1.0"  # pyproject.toml reads the version from this line.
