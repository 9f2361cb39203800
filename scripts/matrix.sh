#!/usr/bin/env bash
# Run scripts/test.sh --quick, and the tests that compile, with several versions of torch and Python, each in a clone of the
# last commit. Reports versions that cannot be installed. Downloads gigabytes. Arguments are versions of torch.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -gt 0 ]] || set -- 2.11.0 2.13.0 2.15.0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p runs/matrix "$folder/bin"
export PATH="$folder/bin:$PATH"

for python in python3.11 python3.12 python3.13 python3.14; do
    "$python" -c "" 2>/dev/null || { echo "$python: not on this machine"; continue; }
    ln -sf "$(command -v "$python")" "$folder/bin/python3"
    for version in "$@"; do
        name="$python, torch $version"
        log="runs/matrix/$name.log"
        git clone --quiet . "$folder/clone"
        sed -i "s/^torch==.*/torch==$version/" "$folder/clone/scripts/constraints.txt"
        status=0
        "$folder/clone/scripts/test.sh" --quick >"$log" 2>&1 || status=$?
        "$folder/clone/scripts/test.sh" -k "compile or inductor" >>"$log" 2>&1 || status=$?
        [[ -f $folder/clone/.venv/prepared ]] || status="unknown: syncbn or torch cannot be installed ($log)"
        echo "$name: status $status"
        grep -E '^(== failed|[a-z0-9 ]+): ' "$log" | sed 's/^/    /' # the summaries that run_tests.py prints
        rm -rf "$folder/clone"
    done
done
