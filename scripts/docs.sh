#!/usr/bin/env bash
# The guides of docs/ and the API, from the docstrings, in runs/docs/index.html. A warning is an error, as is a broken
# link between pages.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
install_pinned furo myst-parser sphinx
python -m sphinx --fail-on-warning --keep-going --quiet -b html docs runs/docs
echo "runs/docs/index.html"
