#!/usr/bin/env bash
# Run all tests by scripts/run_tests.py, the most important tests (--quick), or the tests of the scripts and of the plugin voting,
# and tests/distributed on 4 ranks (--nightly). Other arguments go to pytest: scripts/test.sh -k mask
set -euo pipefail
echo "On two cores all tests take about 4 minutes, with --quick 1. Missing packages are installed first."
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
[[ ${1-} == --quick ]] || prepare_triton || echo "Triton cannot be installed, so its tests are skipped"
exec python3 scripts/run_tests.py "$@"
