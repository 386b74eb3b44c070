"""What the packages offer by name is there: modules move, and nothing imports a name before a user does."""

from importlib import import_module

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize("package", ["nearflash.training", "nearflash.offload"])
def test_every_public_name_can_be_imported(package):
    module = import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


def test_other_names_are_attribute_errors():
    for package in ("nearflash.training", "nearflash.offload"):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = import_module(package).nothing
