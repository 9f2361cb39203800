#!/usr/bin/env bash
# Run all tests in parts, with scripts/run_tests.py; with --quick as the first argument the most important tests, with --nightly
# the tests of the scripts, the guides and the tests themselves. Other arguments go to pytest, as in: scripts/test.sh -k mask
set -euo pipefail
echo "All tests take about 10 minutes on two cores, the essential ones (--quick) 2; what is not installed is installed first."
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
[[ ${1-} == --quick ]] || prepare_triton || echo "Triton cannot be had here: its tests are skipped"
exec python3 scripts/run_tests.py "$@"
