"""Errors: each is a NearflashError and the builtin that a caller would expect."""

import pytest

from nearflash.abi import errors
from nearflash.abi.bitmap import bitmap_error
from nearflash.abi.topk import StreamFault

BUILTINS = {
    "ConfigError": ValueError,
    "UnknownDeviceError": LookupError,
    "BitstreamError": ValueError,
    "AddressError": ValueError,
    "AlignmentError": ValueError,
    "ShapeError": ValueError,
    "FormatError": TypeError,
    "CommandError": ValueError,
    "NonFiniteError": ArithmeticError,
    "DeviceError": RuntimeError,
    "DeviceLostError": RuntimeError,
    "StreamError": ValueError,
    "WaitTimeoutError": TimeoutError,
    "StateError": OSError,
    "StorageFullError": OSError,
    "PageError": OSError,
    "UnsupportedError": NotImplementedError,
}


def test_every_error_is_public_and_documented():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == set(errors.__all__)
    assert all(getattr(errors, name).__doc__ for name in classes)


WARNINGS = {"LostStepWarning", "NoGradientWarning", "OtherWeightsWarning", "UncheckedWarning", "UnmarkedStateWarning"}


@pytest.mark.parametrize("name", sorted(WARNINGS))
def test_a_warning_is_no_error(name):
    warning = getattr(errors, name)
    assert issubclass(warning, UserWarning) and not issubclass(warning, errors.NearflashError)


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - WARNINGS - {"NearflashError"}))
def test_each_is_caught_as_ours_and_as_the_builtin(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.NearflashError)
    assert issubclass(error, BUILTINS.get(name, Exception))


def test_a_lost_device_and_a_damaged_stream_are_faults_of_a_device():
    assert issubclass(errors.DeviceLostError, errors.DeviceError)
    assert issubclass(errors.StreamError, errors.DeviceError)
    assert not issubclass(errors.StateError, errors.DeviceError)


def test_pages_of_a_page_error():
    error = errors.PageError("page 3 must be valid, not erased", [(3, ("k", 0))])
    assert error.pages == ((3, ("k", 0)),)
    assert str(error) == "page 3 must be valid, not erased"
    assert errors.PageError("all").pages == ()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (StreamFault.HEADER, "must begin with the header of a bitmap matrix of the shape and format expected"),
        (StreamFault.LENGTH, "must end where its header states"),
        (StreamFault.CHECKSUM, "must have the CRC32C that is written in it"),
        (StreamFault.COUNT, "must have no values beyond its columns"),
    ],
)
def test_errors_of_a_matrix(fault, text):
    error = bitmap_error(fault, "7")
    assert error.fault is fault
    assert str(error) == f"a bitmap matrix {text}, not 7; compress the weights again"
