#!/usr/bin/env bash
# All tests: on 2, 3 (with the reference kernels) and 4 ranks, those of the GPU's kernels in Triton's interpreter, and then on
# one process. Ends with pytest's summary.
#   --quick    the essential part, under 3 minutes: 2 ranks, and no test that starts other programs or is interpreted
# Other arguments go to pytest, as in: scripts/test.sh -k voting
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment

interpreted=(tests/test_kernels.py tests/test_moments.py)
rank_counts=(2 3 4)
one_process=()
if [[ "${1:-}" == --quick ]]; then
    shift
    rank_counts=(2)
    interpreted=()
    one_process=(--ignore tests/test_examples.py --ignore tests/test_faults.py --ignore tests/test_voting.py)
fi

[[ ${#interpreted[@]} == 0 ]] || prepare_triton || echo "Triton cannot be had here: its tests are skipped" >&2
status=0
for count in "${rank_counts[@]}"; do
    echo "== $count ranks"
    kernels=${SYNCBN_KERNELS-}
    [[ $count != 3 ]] || kernels=reference
    env ${kernels:+SYNCBN_KERNELS=$kernels} PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" python3 -m torch.distributed.run --standalone --nproc-per-node "$count" \
        --local-ranks-filter 0 -m pytest -p voting tests/distributed "$@" || status=1
done
if [[ ${#interpreted[@]} != 0 ]]; then
    echo "== interpreted"
    TRITON_INTERPRET=1 python -m pytest "${interpreted[@]}" -k triton "$@" || { [[ $? == 5 ]] || status=1; }
fi
echo "== one process"
python -m pytest tests --ignore tests/distributed "${one_process[@]}" "$@" || { [[ $? == 5 ]] || status=1; } # 5: the arguments select no test of this part
exit $status
