"""A command on another machine, by the user's own ssh: names, keys, and passwords are as ssh has them."""

import re
import shutil

from nearflash.abi.errors import CommandError

__all__ = ["HOST", "ssh_command"]

HOST = r"(?:[\w.-]+@)?[\w.-]+"
"""Pattern of [USER@]HOST, with nothing that a shell or ssh takes for something else."""


def ssh_command(host: str, command: str, *options: str) -> list[str]:
    """The arguments of a process that runs a command there, in the shell of the user's account.

    Raises CommandError for a host that is no name, and where this machine has no ssh.
    """
    if not re.fullmatch(HOST, host):
        raise CommandError(f"host must be USER@HOST or HOST, not {host!r}")
    if shutil.which("ssh") is None:
        raise CommandError("ssh must be on PATH to reach another machine, not missing (apt install openssh-client)")
    return ["ssh", *options, "--", host, command]
