"""Names of the standard library since Python 3.11, for boards: PYNQ's last images of a Zynq-7000 have 3.10."""

import sys

__all__ = ["UTC", "Self", "StrEnum", "tomllib"]

if sys.version_info >= (3, 11):  # noqa: UP036
    import tomllib
    from datetime import UTC
    from enum import StrEnum
    from typing import Self
else:
    from datetime import timezone
    from enum import Enum
    from typing import TypeVar

    from nearflash.abi import _tomllib as tomllib  # a board's wheel carries it

    UTC = timezone.utc  # noqa: UP017
    Self = TypeVar("Self")

    class StrEnum(str, Enum):  # noqa: UP042
        """Texts by name, each of which prints as itself."""

        __str__ = str.__str__
