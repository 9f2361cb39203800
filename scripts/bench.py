"""Time batch norm. Each PART prints where and how it measured, and has a --help of its own.

    python scripts/bench.py [layers]      layers beside torch's, one written by hand, and the limit that memory sets
    python scripts/bench.py kernels       each function of the kernels beside a copy
    python scripts/bench.py guard [REF]   the C++ kernels beside those of another commit
    python scripts/bench.py steps         whole training steps
    python scripts/bench.py launches      the host's time for a tiny layer on a GPU, without a GPU

Layers and steps run on several ranks too, under torchrun. Only ratios of times of one run mean anything.
"""

import argparse
import importlib
import sys

PARTS = ("layers", "kernels", "guard", "steps", "launches")


def main() -> None:
    """Run one part, layers without a name."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
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
