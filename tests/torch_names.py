"""Names that differ between versions of torch."""

import inspect

from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed the argument and warns of the old name.
_arguments = inspect.signature(DistributedDataParallel.__init__).parameters
BROADCAST_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _arguments else "broadcast_buffers"
