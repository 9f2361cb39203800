#!/usr/bin/env bash
# All tests: on 2, 3 (with the reference kernels) and 4 ranks and, of the GPU's kernels, in Triton's interpreter; beside
# those, as much of them waits, on one process. Ends with what failed and pytest's summary of each part.
#   --quick    the essential part, under 3 minutes: 2 ranks, and no test that starts other programs or is interpreted
# Other arguments go to pytest, as in: scripts/test.sh -k voting
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment

rank_counts=(2 3 4)
interpreted=(tests/test_kernels.py tests/test_moments.py)
one_process=(tests --ignore tests/distributed)
if [[ "${1:-}" == --quick ]]; then
    shift
    rank_counts=(2)
    interpreted=()
    for programs in accelerate crashes examples faults imagenet lightning testing two_hosts voting; do
        one_process+=(--ignore "tests/test_$programs.py")
    done
fi
[[ ${#interpreted[@]} == 0 ]] || prepare_triton || echo "Triton cannot be had here: its tests are skipped" >&2

logs=$(mktemp -d)
failed=$logs/failed # a line for each part that has
touch "$failed"

ended() { # NAME STATUS
    [[ $2 == 0 || $2 == 5 ]] || echo "$1" >>"$failed" # 5: the arguments select no test of this part
}

part() { # NAME COMMAND...
    local name=$1 status=0
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$logs/$name.log" || status=$?
    ended "$name" $status
}

python3 -m pytest "${one_process[@]}" "$@" >"$logs/one process.log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -rf "$logs"' EXIT

for count in "${rank_counts[@]}"; do
    kernels=${SYNCBN_KERNELS-}
    [[ $count != 3 ]] || kernels=reference
    part "$count ranks" env ${kernels:+SYNCBN_KERNELS=$kernels} PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" python3 -m torch.distributed.run \
        --standalone --nproc-per-node "$count" --local-ranks-filter 0 -m pytest -p voting tests/distributed "$@"
done
[[ ${#interpreted[@]} == 0 ]] || part "interpreted" env TRITON_INTERPRET=1 python3 -m pytest "${interpreted[@]}" -k triton "$@"
echo "== one process"
status=0
wait "$beside" || status=$?
ended "one process" $status
cat "$logs/one process.log"

summary='^=.* in [0-9.]*s'
while read -r name; do
    echo "== failed: $name"
    if grep -q "$summary" "$logs/$name.log"; then
        sed -n "/^=.* \\(FAILURES\\|ERRORS\\) =/,/$summary/p" "$logs/$name.log" | tail -n 200
    else
        tail -n 60 "$logs/$name.log"
    fi
done <"$failed"
for log in "$logs"/*.log; do
    echo "$(basename "$log" .log): $(grep "$summary" "$log" | tail -n 1)"
done
[[ ! -s $failed ]]
