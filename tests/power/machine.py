"""The machine whose power is cut: an image of Python and nearflash, Debian's cloud kernel, QEMU with a logged drive.

Everything is kept in a folder: `kernel/`, `root.ext4` (a digest beside it states what it was made of), and for each run
`base` (the file system before it), `data` and `log`.

Source: QEMU, block driver blklogwrites; Linux, Documentation/admin-guide/device-mapper/log-writes.rst.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

__all__ = ["FILE_SYSTEM_BYTES", "MARK_BYTES", "Machine", "run_tool"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "numpy.libs", "crc32c", "crc32c-*.dist-info")
"""Beside the standard library, what `nearflash.storage` imports."""
MARK_BYTES = 4096
"""At the end of the drive, behind the file system: what the guest has been told."""
FILE_SYSTEM_BYTES = {"ext4": 32 << 20, "xfs": 64 << 20}
_SMALL_XFS = {"TEST_DEV": "1", "TEST_DIR": "1", "QA_CHECK_FS": "1"}
"""Have mkfs.xfs make file systems below 300 MB, as for xfs' own tests."""
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox mount -t tmpfs none /tmp
for module in /modules/*.ko; do /bin/busybox insmod $module; done
export HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/nearflash/host:/packages
set -- $(/bin/busybox cat /proc/cmdline)
for word; do case $word in nearflash.*) run="$run ${word#*=}";; esac; done
{python} /nearflash/tests/power/guest.py $run 2>&1
echo "guest ended with $?"
/bin/busybox poweroff -f
"""


def run_tool(*command: object, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run a program; its output is shown where it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


class Machine:
    """See `record`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kernel = next((folder / "kernel/boot").glob("vmlinuz-*"))
        self._image = folder / "root.ext4"
        self._make_root()

    def record(self, workload: str, file_system: str, seconds: int = 900) -> tuple[Path, Path]:
        """Boot, run a workload on a new file system, and return that before it, and the log of the drive's writes."""
        base, data, log = (self.folder / f"{workload}-{file_system}.{name}" for name in ("base", "data", "log"))
        size_bytes = FILE_SYSTEM_BYTES[file_system]
        base.unlink(missing_ok=True)
        with base.open("wb") as file:
            file.truncate(size_bytes)
        if file_system == "ext4":
            run_tool("mke2fs", "-q", "-t", "ext4", "-b", 4096, "-J", "size=4",
                     "-E", "lazy_itable_init=0,lazy_journal_init=0", base)  # fmt: skip
        else:
            run_tool("mkfs.xfs", "-q", "-f", base, env=os.environ | _SMALL_XFS)
        with base.open("r+b") as file:
            file.truncate(size_bytes + MARK_BYTES)
        shutil.copyfile(base, data)
        log.unlink(missing_ok=True)
        with log.open("wb") as file:
            file.truncate(1 << 30)
        self._boot(f"nearflash.action=record nearflash.work={workload} nearflash.fs={file_system}", [
            "-blockdev", f"driver=file,filename={data},node-name=data",
            "-blockdev", f"driver=file,filename={log},node-name=log",
            "-blockdev", "driver=blklogwrites,file=data,log=log,log-sector-size=512,node-name=logged",
            "-device", "nvme,drive=logged,serial=data",
        ], seconds)  # fmt: skip
        data.unlink()
        return base, log

    def check(self, workload: str, file_system: str, images: Path, cases: Path, seconds: int) -> list[str | None]:
        """Mount each image of a file in a guest, and check it; what is wrong with each. cases: JSON of the marks."""
        words = f"nearflash.action=check nearflash.work={workload} nearflash.fs={file_system}"
        drives = [
            *("-drive", f"file={images},if=none,id=images,format=raw", "-device", "nvme,drive=images,serial=images"),
            *("-drive", f"file={cases},if=none,id=cases,format=raw", "-device", "nvme,drive=cases,serial=cases"),
        ]
        lines = self._boot(words, drives, seconds).splitlines()
        return [json.loads(line.partition("RESULT ")[2]) for line in lines if "RESULT " in line]

    def _boot(self, words: str, drives: list[str], seconds: int) -> str:
        console = f"console=ttyS0 quiet root=/dev/nvme0n1 ro init=/init panic=-1 {words}"
        start = time.monotonic()
        done = run_tool(
            "timeout", seconds, "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", 1500,
            "-smp", 2, "-nographic", "-no-reboot", "-net", "none", "-kernel", self._kernel, "-append", console,
            "-drive", f"file={self._image},if=none,id=root,format=raw,readonly=on",
            "-device", "nvme,drive=root,serial=root", *drives, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if "guest ended with 0" not in done.stdout:
            raise RuntimeError(f"the guest must end with 0:\n{done.stdout[-6000:]}")
        print(f"guest: {words}, {time.monotonic() - start:.0f} s", flush=True)
        return done.stdout

    # The root image

    def _make_root(self) -> None:
        """An ext4 image of all that the guest runs, made again where a part of it has changed."""
        digest = self._digest()
        stated = self.folder / "root.digest"
        if stated.exists() and stated.read_text() == digest and self._image.exists():
            return
        tree = self.folder / "root"
        shutil.rmtree(tree, ignore_errors=True)
        self._copy_python(tree)
        self._copy_nearflash(tree)
        self._copy_system(tree)
        self._copy_libraries(tree)
        size_kib = int(run_tool("du", "-sk", tree).stdout.split()[0])
        self._image.unlink(missing_ok=True)
        run_tool("mke2fs", "-q", "-t", "ext4", "-d", tree, self._image, f"{size_kib * 5 // 4 + 20_000}k")
        shutil.rmtree(tree)
        stated.write_text(digest)

    def _digest(self) -> str:
        found = hashlib.sha256(sys.version.encode() + self._kernel.name.encode())
        for path in sorted([*(ROOT / "host/nearflash").rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
            found.update(path.read_bytes())
        return found.hexdigest()

    @staticmethod
    def _copy_python(tree: Path) -> None:
        ignored = shutil.ignore_patterns(
            "test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "ensurepip", "__pycache__", "*.a",
            "config-*",
        )  # fmt: skip
        library = Path(sysconfig.get_paths(vars={"base": sys.base_prefix})["stdlib"])
        shutil.copytree(library, tree / library.relative_to("/"), ignore=ignored)
        program = Path(sys.executable).resolve()
        (tree / program.relative_to("/")).parent.mkdir(parents=True)
        shutil.copy2(program, tree / program.relative_to("/"))

    @staticmethod
    def _copy_nearflash(tree: Path) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "tests", "*.bit", "*.gguf")
        shutil.copytree(ROOT / "host/nearflash", tree / "nearflash/host/nearflash", ignore=ignored)
        shutil.copytree(Path(__file__).parent, tree / "nearflash/tests/power", ignore=ignored)
        installed = Path(sysconfig.get_paths()["purelib"])
        for package in (path for name in PACKAGES for path in installed.glob(name)):
            shutil.copytree(package, tree / "packages" / package.name, ignore=ignored)

    def _copy_system(self, tree: Path) -> None:
        for name in ("bin", "dev", "proc", "sys", "tmp", "mnt", "modules"):
            (tree / name).mkdir(exist_ok=True)
        shutil.copy2(shutil.which("busybox") or "busybox", tree / "bin/busybox")
        for number, name in enumerate(("libcrc32c", "xfs", "loop")):  # in the order in which they need each other
            module = next((self.folder / "kernel/lib/modules").rglob(f"{name}.ko"))
            shutil.copy2(module, tree / f"modules/{number}-{name}.ko")
        init = tree / "init"
        init.write_text(_INIT.replace("{python}", str(Path(sys.executable).resolve())))
        init.chmod(0o755)

    @staticmethod
    def _copy_libraries(tree: Path) -> None:
        """The shared libraries of everything that was copied, at their own paths."""
        programs = [tree / Path(sys.executable).resolve().relative_to("/"), *tree.rglob("*.so*")]
        listed = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
        words = {word for line in listed.splitlines() for word in line.split() if word.startswith("/")}
        for library in map(Path, sorted(word for word in words if not word.endswith(":"))):
            target = tree / library.relative_to("/")
            if library.is_file() and not library.is_relative_to(tree) and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library.resolve(), target)
