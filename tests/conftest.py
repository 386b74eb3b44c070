"""Options of the whole test run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        help="devices that tests/system runs on, for example verilator:update-tiny; may be given several times",
    )
