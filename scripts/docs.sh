#!/usr/bin/env bash
# Build runs/docs/index.html from the guides in docs/ and the docstrings. Warnings are errors, also about a broken link
# between pages. Uses the active virtual environment if it has torch, otherwise .venv.
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
