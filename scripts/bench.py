"""Time batch norm. Each PART prints where and how it measured, and has its own --help.

    python scripts/bench.py [layers]      layers compared with torch's, a hand-written layer, and memory's limit
    python scripts/bench.py kernels       each function of the kernels compared with a copy
    python scripts/bench.py guard [REF]   the C++ kernels compared with those of another commit
    python scripts/bench.py steps         whole training steps

Layers and steps run on several ranks too, under torchrun. Compare times of one run only.
"""

import argparse
import importlib
import sys

PARTS = ("layers", "kernels", "guard", "steps")


def main() -> None:
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        sys.exit(print(__doc__))
    part = words.pop(0) if words and not words[0].startswith("-") else "layers"
    if part not in PARTS:
        sys.exit(f"the parts are {', '.join(PARTS)}, got {part}")
    module = importlib.import_module(f"benchmarks.{part}")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"bench.py {part}", description=module.__doc__, formatter_class=raw)
    module.add_arguments(parser)
    sys.exit(module.run(parser.parse_args(words)))


if __name__ == "__main__":
    main()
