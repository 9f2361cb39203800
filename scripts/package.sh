#!/usr/bin/env bash
# Builds the sdist and the wheel into runs/dist, installs each into an environment that has torch and nothing of this
# project, with a compiler and without, and runs tests/test_tiny.py there. Some minutes: by hand.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
install_pinned build
rm -rf runs/dist && mkdir -p runs
python -m build --no-isolation --outdir runs/dist . >runs/build.log 2>&1 || { cat runs/build.log; exit 1; }
ls -l runs/dist

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
export PATH="$folder/environment/bin:$PATH"
install_pinned setuptools torch pytest numpy
cp tests/test_tiny.py tests/trained_as_one.py "$folder"
for file in runs/dist/*.whl runs/dist/*.tar.gz; do
    for compiler in g++ none; do
        echo "== $(basename "$file"), compiler: $compiler"
        [[ $compiler == g++ ]] && cc=gcc cxx=g++ || cc=false cxx=false
        CC=$cc CXX=$cxx install_pinned --no-build-isolation --no-cache-dir "$file"
        (cd "$folder" && python -c 'import syncbn; print(syncbn.kernels.available())' && python -m pytest -q test_tiny.py)
        python -m pip uninstall --quiet --yes syncbn
    done
done
