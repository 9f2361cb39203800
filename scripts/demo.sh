#!/usr/bin/env bash
# Train on real digits three ways: one process, 2 ranks with syncbn, 2 ranks with local batch norm. About a minute.
# Arguments go to examples/digits.py (see --help); results go to runs/digits.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment examples
python -m torch.distributed.run --standalone --nproc-per-node 2 examples/digits.py "$@"
