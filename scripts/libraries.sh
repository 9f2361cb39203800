#!/usr/bin/env bash
# Trains models of other libraries on 2 ranks and on one process, with scripts/libraries.py, and writes the figures to
# docs/works_with.md; then by engines that launch jobs, whose distances (docs/engines.md) are printed. The libraries go
# to an environment of their own, runs/libraries, in their newest versions beside the torch of scripts/constraints.txt;
# gigabytes, so by hand. Arguments: only these libraries, no engine, and nothing is written.
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
[[ $# == 0 ]] || exit 0
install_pinned accelerate lightning ray[train]
install_pinned --no-build-isolation deepspeed
for engine in torchrun accelerate fabric trainer ignite deepspeed{0..3}; do
    torchrun --standalone --nproc-per-node 2 scripts/engines.py "$engine"
done
torchrun --standalone --nproc-per-node 4 scripts/engines.py hsdp
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else a restart meets the addresses of the ranks before, pytorch#135712
torchrun --standalone --nproc-per-node 2 --max-restarts 1 scripts/engines.py elastic
for is_host in 1 0; do # the second agent, which joins later, is the one that is killed
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29612 \
        --rdzv-id "engines-$$" --rdzv-conf "is_host=$is_host,last_call_timeout=5" scripts/engines.py elastic &
    agents+=($!) && sleep 1
done
wait "${agents[0]}"
for engine in spawn ray; do python scripts/engines.py "$engine"; done
if command -v mpirun >/dev/null; then mpirun -np 2 python scripts/engines.py mpirun; fi
export SLURM_NTASKS=2 # as srun does
SLURM_PROCID=1 SLURM_LOCALID=1 python scripts/engines.py slurm &
SLURM_PROCID=0 SLURM_LOCALID=0 python scripts/engines.py slurm
