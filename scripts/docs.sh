#!/usr/bin/env bash
# The API documentation, from the docstrings, in runs/docs/index.html. A warning is an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
install_pinned sphinx
python -m sphinx --fail-on-warning --keep-going --quiet -b html scripts/docs runs/docs
echo "runs/docs/index.html"
