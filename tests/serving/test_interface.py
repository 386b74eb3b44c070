"""An engine with another interface is refused at the start, by the method's name."""

from abc import ABC, abstractmethod

import pytest

from nearflash.abi.errors import UnsupportedError
from nearflash.serving.interface import check_interface


class Tier(ABC):
    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def drain_jobs(self): ...


KNOWN = {"lookup": ("key", "req_context"), "drain_jobs": ()}


def test_the_interface_of_the_adapter_is_taken():
    check_interface(Tier, KNOWN, "vLLM")


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"lookup": ("key", "req_context")}, "none but known methods of a tier, not drain_jobs"),
        (KNOWN | {"lookup": ("key",)}, r"must call lookup\('key',\) of a tier"),
        (KNOWN | {"submit_load": ("job",)}, r"must call submit_load\('job',\) of a tier, not None"),
    ],
)
def test_another_one_is_refused(methods, message):
    with pytest.raises(UnsupportedError, match=message):
        check_interface(Tier, methods, "vLLM")
