#!/usr/bin/env bash
# What only a machine with one GPU or several can show, in under 9 minutes: tests, benchmarks, the digits job; last, a table
# of verdicts. Exit status 0 when all but the benchmarks passed. Logs, results and a summary of them all, gpu.json, go to
# the folder $OUT, or runs/gpu. Needs no network where python3 has torch, with triton, and what pyproject.toml calls test.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment

unset TRITON_INTERPRET
output=${OUT:-runs/gpu}
mkdir -p "$output"
rm -f "$output"/*.log "$output"/gpu.json "$output"/{digits,bench,bench_kernels,bench_compiled}/*.json # of an earlier run
needed='hypothesis, pytest_timeout, sklearn, torch, triton' # the benchmarks rich and matplotlib, too
gpus=$(python3 -c "import $needed; print(torch.cuda.device_count())") || exit
if [[ $gpus == 0 ]]; then
    echo "torch sees no GPU here; scripts/test.sh is for machines without one" >&2
    exit 1
fi
python3 -c 'import torch, triton; print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)'

failed=0
: >"$output/steps.tsv"
step() { # name, whether it must pass, seconds, command
    local name=$1 must_pass=$2 seconds=$3 start=$SECONDS verdict=passed code
    shift 3
    echo "== $name"
    # torchrun needs 30 s to end ranks that do not listen.
    timeout --signal INT --kill-after 40 "$seconds" "$@" >"$output/$name.log" 2>&1
    code=$?
    tail -n 30 "$output/$name.log"
    case $code in
    0) ;;
    124 | 137) verdict="took longer than $seconds s, or was killed" ;;
    *) verdict="failed ($code)" ;;
    esac
    [[ $code == 0 || $must_pass == no ]] || failed=1
    printf '%s\t%s\t%d\n' "$name" "$verdict" $((SECONDS - start)) >>"$output/steps.tsv"
}
torchrun=(python3 -m torch.distributed.run --standalone --nproc-per-node)
tests=(--local-ranks-filter 0 -m pytest -q -p voting)
without_compile=(tests/distributed --ignore tests/distributed/test_compile.py) # which has a step of its own
workers=()
kernels_seconds=240
python3 -c 'import xdist' 2>/dev/null && workers=(-n 12) kernels_seconds=100 # Triton compiles on the CPU
export PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}"

triton_runs='import sys, syncbn; print(syncbn.kernels.available()); sys.exit("cuda: Triton" not in syncbn.kernels.available())'
step triton yes 30 python3 -c "$triton_runs" # else the other steps would test torch operations
step kernels yes "$kernels_seconds" python3 -m pytest -q "${workers[@]}" tests/test_kernels.py tests/test_moments.py -k triton
step gpu yes 50 python3 -m pytest -q tests/test_gpu.py # nccl too, with one rank
[[ $gpus == 1 ]] || step nccl yes 80 "${torchrun[@]}" "$gpus" "${tests[@]}" "${without_compile[@]}"
step gloo_two_ranks_a_gpu yes 100 "${torchrun[@]}" $((gpus * 2)) "${tests[@]}" "${without_compile[@]}"
step compile yes 80 "${torchrun[@]}" 2 "${tests[@]}" tests/distributed/test_compile.py
step digits yes 40 "${torchrun[@]}" "$gpus" examples/digits.py --epochs 2 --output "$output/digits"
step bench_kernels no 40 python3 scripts/bench_kernels.py --output "$output/bench_kernels"
shapes=(64x64x56x56 64x256x56x56 256x256x28x28 256x2048x7x7)
step bench no 60 "${torchrun[@]}" 1 scripts/bench.py --shapes "${shapes[@]}" --dtypes float32 bfloat16 --rounds 10 --output "$output/bench"
step bench_compiled no 40 "${torchrun[@]}" 1 scripts/bench.py --shapes "${shapes[1]}" --dtypes bfloat16 --compiled --rounds 10 \
    --output "$output/bench_compiled"

echo
column -t -s $'\t' "$output/steps.tsv" 2>/dev/null || cat "$output/steps.tsv"
python3 - "$output" <<'PYTHON'
import json, sys
from pathlib import Path

output = Path(sys.argv[1])
steps = [line.split("\t") for line in (output / "steps.tsv").read_text().splitlines()]
summary = {"steps": [{"name": name, "verdict": verdict, "seconds": int(seconds)} for name, verdict, seconds in steps]}
for file in sorted(output.glob("*/*.json")):
    try:
        summary[f"{file.parent.name}/{file.name}"] = json.loads(file.read_text())
    except ValueError as error:  # of a step that was stopped
        summary[f"{file.parent.name}/{file.name}"] = str(error)
(output / "gpu.json").write_text(json.dumps(summary, indent=1))
print(f"wrote {output}/gpu.json")
PYTHON
exit $failed
