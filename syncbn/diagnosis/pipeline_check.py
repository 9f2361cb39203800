"""Refuses a layer in a pipeline's stage that would wait for ranks which hold other stages."""

from __future__ import annotations

import sys
from types import FrameType

import torch.distributed as dist

from syncbn import torch_private
from syncbn.distributed.text_exchange import ranks_in_words


def require_one_stage(group: dist.ProcessGroup) -> None:
    """Look for a stage of torch.distributed.pipelining among the callers of a layer that synchronises over `group`.

    Such ranks would wait for each other: one in batch norm, the next for the output of the stage before it. **Raises**
    ValueError where the group has several ranks of one pipeline.
    """
    frame: FrameType | None = sys._getframe().f_back  # not this frame, whose f_locals would hold it, and the group
    while frame is not None:
        stage = frame.f_locals.get("self")
        if torch_private.is_pipeline_stage(stage):
            ranks, pipeline = (dist.get_process_group_ranks(one) for one in (group, stage.group or dist.group.WORLD))
            if len({*ranks} & {*pipeline}) > 1:
                raise ValueError(
                    f"the layer is in stage {stage.stage_index} of a pipeline over {ranks_in_words(pipeline)}, which "
                    f"hold other stages, and synchronises over {ranks_in_words(ranks)}; convert the stage with the "
                    "group of the ranks that hold the same stage, or with process_group=1 where that is one rank"
                )
            return
        frame = frame.f_back
