# Sourced by the other scripts: prepare_environment puts a Python with syncbn and all extras of pyproject.toml first on PATH.
# That is .venv in the project, made on first use; or the current interpreter when it has torch and pip reaches no index.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores

prepare_environment() {
    local wanted
    wanted=$(cat pyproject.toml scripts/constraints.txt scripts/{environment.sh,build_kernels.py} syncbn/*/*.{cpp,h} | cksum)
    if [[ ! -x .venv/bin/pip ]]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "syncbn needs Python 3.11 or newer, got " + sys.version)' || exit 1
        if python3 -c 'import torch' 2>/dev/null && ! pip_reaches_an_index; then
            export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
            python() { python3 "$@"; }
            return
        fi
        echo "Making .venv (once; this downloads PyTorch)" >&2
        python3 -m venv .venv
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    if ! grep -qxF "$wanted" .venv/prepared 2>/dev/null; then
        echo "Installing syncbn" >&2
        install_pinned hatchling torch
        install_pinned --no-build-isolation --editable ".[check,test]"
        echo "$wanted" >.venv/prepared
    fi
}

# Triton, with which the GPU's kernels run on CPUs too; 0.6 GB, and for tests only. Not among the constraints, as a torch
# for GPUs asks for a version of its own and brings it. (The interpreter of 3.6 needs a numpy before 2.4.)
prepare_triton() {
    [[ ! -x .venv/bin/pip ]] || python -c 'import triton' 2>/dev/null || install_pinned --no-deps triton==3.6.0
}

pip_reaches_an_index() {
    python3 -m pip download --quiet --no-deps --retries 0 --timeout 5 --dest "$(mktemp -d)" setuptools >/dev/null 2>&1
}

install_pinned() {
    python -m pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt "$@"
}
