#!/usr/bin/env bash
# scripts/test.sh --quick, and what is compiled, with several versions of torch and Python, each in a clone of the last
# commit; those that cannot be installed here are said. Downloads gigabytes, and takes long: by hand. Arguments: versions of
# torch.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $# -gt 0 ]] || set -- 2.11.0 2.13.0 2.15.0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p runs/matrix

for python in python3.11 python3.12 python3.13 python3.14; do
    "$python" -c "" 2>/dev/null || {
        echo "$python: not on this machine"
        continue
    }
    for version in "$@"; do
        name="$python, torch $version"
        log="runs/matrix/$name.log"
        git clone --quiet . "$folder/clone"
        sed -i "s/^torch==.*/torch==$version/" "$folder/clone/scripts/constraints.txt"
        mkdir -p "$folder/bin" && ln -sf "$(command -v "$python")" "$folder/bin/python3"
        status=0
        PATH="$folder/bin:$PATH" "$folder/clone/scripts/test.sh" --quick >"$log" 2>&1 || status=$?
        PATH="$folder/bin:$PATH" "$folder/clone/scripts/test.sh" -k "compile or inductor" >>"$log" 2>&1 || status=$?
        if [[ -f $folder/clone/.venv/prepared ]]; then
            echo "$name: status $status"
            grep -E '^(== failed|[a-z0-9 ]+): ' "$log" | sed 's/^/    /'
        else
            echo "$name: does not install here ($log)"
        fi
        rm -rf "$folder/clone"
    done
done
