#!/usr/bin/env bash
# Run everything that needs a GPU, in at most 540 s. Arguments go to scripts/gpu_run.py. If python3 has torch, triton and pytest,
# no network is needed, and parts that need other packages are skipped. Without a GPU, try scripts/gpu.sh --dry-run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ ! " $* " =~ " "(-h|--help)" " ]] || exec python3 scripts/gpu_run.py --help # installs nothing
prepare_environment test

unset TRITON_INTERPRET
if [[ " $* " != *" --dry-run "* ]] && ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no GPU here; scripts/test.sh is for machines without one, or --dry-run" >&2
    exit 1
fi
exec python3 scripts/gpu_run.py --seconds $((530 - SECONDS)) "$@" # SECONDS counts from the start of this script.
