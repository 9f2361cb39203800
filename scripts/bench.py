"""Time batch norm. All parts report hardware, versions, date and command with the times, and have their own --help.

    python scripts/bench.py [layers]      layers compared with torch's and with a hand-written layer
    python scripts/bench.py kernels       each function of the kernels compared with a copy
    python scripts/bench.py guard REF     the C++ kernels compared with those of another commit
    python scripts/bench.py steps         whole training steps
    python scripts/bench.py gpu           the host's time for a layer, and CUDA graphs, on one GPU

Layers and steps also run on several ranks, under torchrun. Compare times of one run only.
"""

import argparse
import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PARTS = ("layers", "kernels", "guard", "steps", "gpu")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        sys.exit(print(__doc__))
    part = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "layers"
    if part not in PARTS:
        sys.exit(f"the parts are {', '.join(PARTS)}, got {part}")
    sys.path.append(str(EXAMPLES))  # The steps train the models of the examples.
    module = importlib.import_module(f"benchmarks.{part}")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"bench.py {part}", description=module.__doc__, formatter_class=formatter)
    module.add_arguments(parser)
    sys.exit(module.run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
