#!/usr/bin/env bash
# Train a segmentation network on scenes of real digits, one image per rank, in three ways: one process, 2 ranks with syncbn,
# 2 ranks with local batch norm. Arguments go to examples/segmentation.py (see --help). Results are in runs/segmentation.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment examples
python -m torch.distributed.run --standalone --nproc-per-node 2 examples/segmentation.py "$@"
