#!/usr/bin/env bash
# All tests, in parts, four at a time, as those that start programs wait more than they compute: three parts that start
# programs, the longest first, those of the GPU's kernels in Triton's interpreter, the others of one process, and last, as they
# use all cores, those on 2, 3 (with the reference kernels) and 4 ranks. Ends with what failed and pytest's summary of each part.
# With --quick as the first argument the essential part, in 2 minutes: 2 ranks, and none of the files below that mostly start
# programs, compile or interpret. Other arguments go to pytest, as in: scripts/test.sh -k voting
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
unset PYTHONDONTWRITEBYTECODE # where it is set, each of some 200 processes compiles the same files

declare -A starts_programs=( # part -> its files, tests/test_NAME.py
    [examples]="evidence examples imagenet"
    [crashes]="crashes faults two_hosts"
    [programs]="accelerate gpu_run lightning package readme testing voting"
)
compiled=(tests/test_{gpu_static,inductor}.py tests/distributed/test_compile{,_on_one_rank}.py)
others=(tests --ignore=tests/distributed)
for name in ${starts_programs[*]}; do others+=("--ignore=tests/test_$name.py"); done
on_ranks=(tests/distributed) rank_counts=(2 3 4)

logs=$(mktemp -d)
set -m # each part is a process group, which can be ended as one
trap 'for job in $(jobs -pr); do kill -- "-$job"; done; rm -rf "$logs"' EXIT

part() { # NAME COMMAND...: once there is room beside the others
    while [[ $(jobs -pr | wc -l) -ge 4 ]]; do wait -n || true; done
    {
        status=0
        "${@:2}" >"$logs/$1.log" 2>&1 || status=$?
        [[ $status == 0 || $status == 5 ]] || echo "$1" >>"$logs/failed" # 5: the arguments select no test of this part
        echo "== $1"
        cat "$logs/$1.log"
    } &
}

if [[ ${1-} == --quick ]]; then
    shift
    rank_counts=(2)
    others+=("${compiled[@]/#/--ignore=}")
    on_ranks+=("${compiled[@]/#/--ignore=}")
else
    prepare_triton || echo "Triton cannot be had here: its tests are skipped" >&2
    for name in programs crashes examples; do
        part "$name" python3 -m pytest $(printf 'tests/test_%s.py ' ${starts_programs[$name]}) "$@"
    done
    part "interpreted" env TRITON_INTERPRET=1 python3 -m pytest tests/test_kernels.py -m triton "$@"
fi
part "one process" python3 -m pytest "${others[@]}" "$@"
for count in "${rank_counts[@]}"; do
    kernels=${SYNCBN_KERNELS-}
    [[ $count != 3 ]] || kernels=reference
    part "$count ranks" env ${kernels:+SYNCBN_KERNELS=$kernels} PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" python3 -m torch.distributed.run \
        --standalone --nproc-per-node "$count" --local-ranks-filter 0 -m pytest -p voting "${on_ranks[@]}" "$@"
done
wait

touch "$logs/failed"
while read -r name; do
    echo "== failed: $name"
    tail -n 200 "$logs/$name.log"
done <"$logs/failed"
for log in "$logs"/*.log; do
    echo "$(basename "$log" .log): $(grep '^=.* in [0-9.]*s' "$log" | tail -n 1)"
done
[[ ! -s $logs/failed ]]
