#!/usr/bin/env bash
# The guides of docs/ and the API, from the docstrings, in runs/docs/index.html. A warning or a broken link is an error.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
python -c 'import furo, myst_parser, sphinx, sphinx_copybutton' 2>/dev/null ||
    install_pinned furo myst-parser sphinx sphinx-copybutton
python -m sphinx --fail-on-warning --keep-going --quiet -b html docs runs/docs
echo "runs/docs/index.html"
