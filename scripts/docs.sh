#!/usr/bin/env bash
# Build the guides of docs/ and the API, from the docstrings, in runs/docs/index.html. A warning is an error, and so is a
# broken link between pages. Uses the active virtual environment if it has torch, else .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [[ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]] && python -c 'import torch' 2>/dev/null; then
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # the syncbn of this clone
else
    prepare_environment
fi
python -c 'import furo, myst_parser, sphinx, sphinx_copybutton' 2>/dev/null ||
    install_pinned furo myst-parser sphinx sphinx-copybutton
python -m sphinx --fail-on-warning --keep-going -b html docs runs/docs
echo "runs/docs/index.html"
