"""Wheels carry the host's native loops, built for the targets of nearflash.support.native: users need no compiler.

Without a compiler a wheel of Python alone is built, whose loops are compiled where it is used. From a checkout
(`pip install -e`) they are compiled at first use.
"""

import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLoops(BuildHookInterface):  # type: ignore[misc]
    """Builds a library of each C++ file under host/ for each target, and puts it beside the file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        if version == "editable" or platform.machine() != "x86_64":
            return
        host = Path(self.root) / "host"
        sys.path.insert(0, str(host))
        from nearflash.support.native import TARGETS, CompileError, compile_source, locate_prebuilt

        self._folder = tempfile.TemporaryDirectory()
        os.environ["NEARFLASH_CACHE"] = str(Path(self._folder.name) / "cache")
        try:
            for source in sorted(host.rglob("*.cpp")):
                for target in TARGETS:
                    library = Path(self._folder.name) / f"{source.stem}.{target.name}.so"
                    shutil.copy(compile_source(source, target), library)
                    build_data["force_include"][str(library)] = str(locate_prebuilt(source, target).relative_to(host))
        except CompileError as error:
            build_data["force_include"].clear()
            self.app.display_warning(f"a wheel without native loops, which its users compile: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
