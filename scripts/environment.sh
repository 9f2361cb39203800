# The other scripts source this file. `prepare_environment EXTRA...` makes .venv if it is missing, installs syncbn there with
# these extras of pyproject.toml, and puts .venv/bin first on PATH. If there is neither .venv nor an index for pip,
# a python3 with torch is used as it is, without the extras.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # Ranks share the cores.
unset PYTHONDONTWRITEBYTECODE # Without stored bytecode each process would compile torch, which pip does not compile here.

prepare_environment() {
    local extra wanted
    wanted=$(cat pyproject.toml scripts/constraints.txt scripts/environment.sh scripts/build_*.py syncbn/*/*.{cpp,h} | cksum)
    if [[ ! -x .venv/bin/pip ]]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "syncbn needs Python 3.11 or newer, got " + sys.version)' || exit 1
        if python3 -c 'import torch' 2>/dev/null && ! pip_reaches_an_index; then
            export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
            python() { python3 "$@"; }
            return
        fi
        echo "Making .venv (once; this downloads PyTorch)"
        python3 -m venv .venv
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    # .venv/prepared has the checksum of the files at the last installation, and a line for each installed extra.
    if [[ "$(head -n 1 .venv/prepared 2>/dev/null)" != "$wanted" ]]; then
        install_pinned hatchling
        install_pinned --no-build-isolation --editable .
        echo "$wanted" >.venv/prepared
    fi
    for extra in "$@"; do
        grep -qxF "$extra" .venv/prepared && continue
        install_pinned "syncbn[$extra]"
        echo "$extra" >>.venv/prepared
    done
}

# Install Triton (0.6 GB), whose interpreter runs the GPU kernels on CPUs in tests. The version is not in constraints.txt,
# because a torch for GPUs requires its own. (The interpreter of Triton 3.6 needs a numpy before 2.4.)
prepare_triton() {
    if [[ -x .venv/bin/pip ]] && ! python -c 'import triton' 2>/dev/null; then
        install_pinned --no-deps triton==3.6.0
    fi
}

pip_reaches_an_index() {
    python3 -m pip download --quiet --no-deps --retries 0 --timeout 5 --dest "$(mktemp -d)" setuptools >/dev/null 2>&1
}

# --no-compile saves 20 s: Python compiles a module at its first import, and then stores the bytecode.
install_pinned() {
    echo "Installing ${*: -1}"
    python -m pip install --disable-pip-version-check --no-compile --constraint scripts/constraints.txt "$@"
}
