#!/usr/bin/env bash
# Train models of other libraries on 2 ranks and on one process, by scripts/libraries.py, and print the table of
# docs/works_with.md. Installs the newest versions of the libraries, and the torch of scripts/constraints.txt, in
# runs/libraries (gigabytes). Arguments are names of libraries; the default is all.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ -x runs/libraries/bin/pip ]] || python3 -m venv runs/libraries
export PATH="$PWD/runs/libraries/bin:$PATH"
install_pinned torch hatchling
install_pinned --no-build-isolation --editable .
# Without --no-deps torchvision and libraries that need torchvision install another torch, and ultralytics another OpenCV.
install_pinned --no-deps torchvision lightly segmentation-models-pytorch timm ultralytics opencv-python-headless
install_pinned matplotlib monai opacus polars psutil pytorch-ignite pytorch-lightning requests torch-geometric transformers
torchrun --standalone --nproc-per-node 2 --local-ranks-filter 0 scripts/libraries.py "$@"
