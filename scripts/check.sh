#!/usr/bin/env bash
# Check format, lint and types.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment check
python -m ruff format --check .
python -m ruff check .
python -m mypy
