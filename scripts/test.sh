#!/usr/bin/env bash
# Run all tests by scripts/run_tests.py; with --quick the most important; with --nightly those of the scripts, a study and the
# plugin voting, and tests/distributed on 4 ranks. Other arguments go to pytest: scripts/test.sh -k mask
set -euo pipefail
echo "On two cores all tests take about 5 minutes, and --quick takes about 1. Missing packages are installed first."
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
[[ ${1-} == --quick ]] || prepare_triton || echo "Triton cannot be installed, so its tests are skipped"
exec python3 scripts/run_tests.py "$@"
