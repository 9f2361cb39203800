"""Synchronised batch norm for PyTorch: W ranks normalise as one."""

from syncbn import functional as functional
from syncbn import kernels as kernels
from syncbn.convert import convert_syncbn_model as convert_syncbn_model
from syncbn.convert import revert_syncbn_model as revert_syncbn_model
from syncbn.debug_mode import debug as debug
from syncbn.join import join as join
from syncbn.layer import SyncBatchNorm as SyncBatchNorm
from syncbn.layer import SyncBatchNorm1d as SyncBatchNorm1d
from syncbn.layer import SyncBatchNorm2d as SyncBatchNorm2d
from syncbn.layer import SyncBatchNorm3d as SyncBatchNorm3d
from syncbn.new_groups import create_syncbn_process_group as create_syncbn_process_group
from syncbn.running_stats import accumulate_running_stats as accumulate_running_stats
from syncbn.running_stats import merge_running_stats as merge_running_stats
from syncbn.running_stats import recompute_running_stats as recompute_running_stats
from syncbn.summary import summary as summary
from syncbn.synced import assert_synced as assert_synced
