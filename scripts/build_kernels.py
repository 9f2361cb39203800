"""Build the C++ kernels for CPUs if there is a compiler. pip runs this file, see pyproject.toml.

The build needs neither torch nor Python's headers. The kernels use one function of torch, and are linked to a stub of
that function. So one library serves every Python, and every torch from 2.11. Without a compiler, and on systems other
than Linux, the package has Python files only.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY, SOURCE = Path("syncbn/kernels/_cpu.so"), "syncbn/kernels/cpu.cpp"
EDITABLE = Path("build/editable/syncbn")
FLAGS = ["-std=c++20", "-O3", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-ffp-contract=off"]
FLAGS += ["-fvisibility=hidden", "-Wno-attributes"]
SHARED = ["-fPIC", "-shared", "-Wl,--as-needed", "-Wl,-z,defs"]
STUB = 'extern "C" int torch_parallel_for() { return 0; }'


def build(root: Path, library: Path, flags: list[str] = FLAGS) -> None:
    """Compile the kernels to the file `library`, with CXX, CXXFLAGS and LDFLAGS of the environment.

    **Raises** OSError without a compiler, CalledProcessError if the compiler fails.
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    flags = flags + shlex.split(os.environ.get("CXXFLAGS", "")) + SHARED + shlex.split(os.environ.get("LDFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, "stub.cpp")
        stub.write_text(STUB)
        names = ["-Wl,-soname,libtorch_cpu.so", "-o", f"{folder}/libtorch_cpu.so"]
        subprocess.run([*compiler, "-shared", "-fPIC", stub, *names], check=True)
        source = [root / SOURCE, "-o", f"{folder}/built.so", f"-L{folder}", "-ltorch_cpu"]
        subprocess.run([*compiler, *flags, *source], check=True)
        # A file in the same folder replaces the library atomically.
        unfinished = library.with_suffix(".unfinished")
        shutil.copy(f"{folder}/built.so", unfinished)
    unfinished.replace(library)


class KernelsHook(BuildHookInterface[Any]):
    """Adds the library to the wheel, and tags the wheel for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library in the source tree, before hatchling makes a wheel or an editable install."""
        root = Path(self.root)
        if version == "editable":  # The folder on Python's path has the package alone, without tests and examples.
            link = root / EDITABLE
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(Path("..", "..", "syncbn"), target_is_directory=True)
        try:
            if not sys.platform.startswith("linux"):
                raise OSError(f"the kernels are for Linux, not for {sys.platform}")
            build(root, root / LIBRARY, [*FLAGS, "-Wl,--strip-all"])
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"syncbn is built without its kernels for CPUs: {error}")
            return
        build_data["artifacts"] += [str(LIBRARY)]
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
