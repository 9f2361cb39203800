"""Builds cpu.cpp for pip (see pyproject.toml): with the torch of the environment, and only where there is one.

The extension is optional: setuptools warns of a failed build and installs the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

STABLE_ABI_OF = "0x020b000000000000"  # torch 2.11
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={STABLE_ABI_OF}"]


class BuildExtension(build_ext):
    """build_ext against the stable ABI of torch's libraries: one file for every later torch and Python."""

    def build_extension(self, ext: Extension) -> None:
        """Add to `ext` where torch lies; **raises** CompileError where it does not."""
        try:
            import torch
        except ImportError as error:
            raise CompileError("torch is not in the build environment; use --no-build-isolation") from error
        folder = Path(torch.__file__).parent
        ext.include_dirs.append(str(folder / "include"))
        ext.library_dirs.append(str(folder / "lib"))
        ext.libraries.append("torch_cpu")
        ext.extra_compile_args += FLAGS
        if sys.platform.startswith("linux"):
            ext.extra_link_args.append("-Wl,--strip-all")
        super().build_extension(ext)
