#!/usr/bin/env bash
# Trains models of other libraries on 2 ranks and on one process, with scripts/libraries.py, and writes the figures to
# docs/works_with.md. The libraries go to an environment of their own, runs/libraries, in their newest versions beside
# the torch of scripts/constraints.txt; gigabytes, so by hand. Arguments: only these libraries, and nothing is written.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ -x runs/libraries/bin/pip ]] || python3 -m venv runs/libraries
export PATH="$PWD/runs/libraries/bin:$PATH"
install_pinned torch hatchling
install_pinned --no-build-isolation --editable .
# torchvision asks for a torch of its own, three for torchvision, and ultralytics for an OpenCV that needs a display.
install_pinned --no-deps torchvision lightly segmentation-models-pytorch timm ultralytics opencv-python-headless
install_pinned matplotlib monai opacus polars psutil pytorch-ignite pytorch-lightning requests torch-geometric transformers
torchrun --standalone --nproc-per-node 2 --local-ranks-filter 0 scripts/libraries.py "$@"
