#!/usr/bin/env bash
# Run the tests of the C++ kernels under GCC's AddressSanitizer and UndefinedBehaviorSanitizer, also with inputs of more than
# 2^31 elements. Takes minutes and 16 GB. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r syncbn "$folder"
echo "Building" >&2
CXX=g++ CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" LDFLAGS="-Wl,-z,undefs" \
    PYTHONPATH=scripts python -c 'import build_kernels, pathlib, sys
build_kernels.build(pathlib.Path(), sys.argv[1] / build_kernels.LIBRARY)' "$folder"

# Python itself is built without the sanitizers, so preload their libraries, and do not look for leaks.
preloaded="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
export PYTHONPATH="$folder" ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1
LD_PRELOAD="$preloaded" python -P -c 'import sys, syncbn  # Check that Python finds the copy and its kernels.
assert syncbn.__file__.startswith(sys.argv[1]) and syncbn.kernels.available() == "cpu: C++", syncbn.kernels.available()
' "$folder"
LD_PRELOAD="$preloaded" python -P -m pytest tests/test_kernels.py -k "cpu or operators" --large --timeout 900 --capture=sys "$@"
