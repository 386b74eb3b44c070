"""Random matrices of every format on a device of the expand kernel, against the model."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import Coding, ElementFormat, RowFormat, row_format
from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.config import ExpandConfig
from nearflash.device.base import Device
from nearflash.device.drivers.expand import expand_matrix
from nearflash.device.selftest.comparison import Comparison
from nearflash.model.weights.bitmap import expand, pack, pack_scaled
from nearflash.model.weights.dequantize import quantize
from nearflash.model.weights.levels import expand_levels, pack_levels

__all__ = [
    "CODED_FORMATS",
    "MATRIX_FORMATS",
    "SCALED_FORMATS",
    "CodedFormat",
    "MatrixFormat",
    "compare_matrices",
    "format_name",
    "levels_name",
    "random_coded",
    "random_matrix",
]

MatrixFormat: TypeAlias = tuple[ElementFormat, Coding, ElementFormat | None]
"""Elements, coding, and what scaled elements expand to."""

FP16, BF16, INT8, INT4 = ElementFormat
MATRIX_FORMATS: tuple[MatrixFormat, ...] = (
    (FP16, Coding.PLAIN, None),
    (BF16, Coding.PLAIN, None),
    (INT8, Coding.PLAIN, None),
    (FP16, Coding.EXPONENTS, None),
    (BF16, Coding.EXPONENTS, None),
    (INT8, Coding.PLAIN, FP16),
    (INT8, Coding.PLAIN, BF16),
    (INT4, Coding.PLAIN, FP16),
    (INT4, Coding.PLAIN, BF16),
)
"""All that there are."""
SCALED_FORMATS = tuple(form for form in MATRIX_FORMATS if form[2] is not None)
"""Those whose values are products; the others pass no multiplier."""
CodedFormat: TypeAlias = tuple[ElementFormat, int, bool]
"""Elements of coded weights, bits of a first code, and whether blocks have a bitmap."""
CODED_FORMATS: tuple[CodedFormat, ...] = tuple(product((FP16, BF16), (1, 2), (False, True)))
"""All that there are."""
_ROWS, _GROUP_ROWS = 5, 2
_DENSITIES = (0.0, 0.5, 1.0)


def random_matrix(
    rng: np.random.Generator, shape: tuple[int, int], density: float, form: MatrixFormat, group_rows: int = _GROUP_ROWS
) -> bytes:
    """Stream of a matrix of weights: normal values, and among coded ones some with any pattern."""
    element, coding, output = form
    present = rng.random(shape) < density
    if element is INT8 and output is None:
        return pack(np.where(present, rng.integers(1, 1 << 8, shape, np.uint8), np.uint8(0)), element, group_rows)
    patterns = _patterns(rng.normal(0, 0.02, shape).astype(np.float32), output or element)
    if output is not None:
        return pack_scaled(quantize(patterns, element, output, present), group_rows)
    anything = rng.integers(1, 1 << 16, shape, np.uint16)
    mixed = np.where(rng.random(shape) < 0.05, anything, patterns)
    return pack(np.where(present, mixed, np.uint16(0)), element, group_rows, coding)


def random_coded(
    rng: np.random.Generator,
    elements: int,
    density: float,
    form: CodedFormat,
    block_elements: int,
    group_blocks: int = 2,
) -> bytes:
    """Stream of coded weights: normal values, among them some with any pattern, and zeros."""
    normal = _patterns(rng.normal(0, 0.02, (1, elements)).astype(np.float32), form[0])[0]
    anything = rng.integers(1, 1 << 16, elements, np.uint16)
    mixed = np.where(rng.random(elements) < 0.05, anything, normal)
    present = rng.random(elements) < density
    return pack_levels(np.where(present, mixed, np.uint16(0)), *form, block_elements, group_blocks)


def _patterns(values: NDArray[np.float32], element: ElementFormat) -> NDArray[np.uint16]:
    return values.astype(np.float16).view(np.uint16) if element is FP16 else values.view("<u2")[:, 1::2]


def compare_matrices(
    device: Device,
    *,
    columns: int,
    seed: int,
    forms: Iterable[MatrixFormat] = MATRIX_FORMATS,
    densities: Iterable[float] = _DENSITIES,
) -> Iterator[Comparison]:
    """Matrices of every format of `forms` that the build has, by default empty, half full and full; coded weights,
    where it expands those, too.

    Raises CommandError for less than one column, or more than the build has room for; what the device raises.
    """
    config, rng = device.identity.config, np.random.default_rng(seed)
    assert isinstance(config, ExpandConfig)
    if not 1 <= columns <= config.columns_max:
        raise CommandError(f"columns must be between 1 and {config.columns_max}, not {columns!r}")
    known = {form for form in RowFormat if form.name.lower() in config.formats}
    for form in (form for form in forms if row_format(*form) in known):
        for density in densities:
            stream = random_matrix(rng, (_ROWS, columns), density, form)
            expected, dense = expand(stream), expand_matrix(device, stream).dense
            yield Comparison(f"{format_name(form):<22}{density:g}", expected.size, int((dense != expected).sum()))
    for coded in CODED_FORMATS if config.levels else ():
        for density in densities:
            stream = random_coded(rng, _ROWS * columns, density, coded, columns)
            expected, dense = expand_levels(stream), expand_matrix(device, stream).dense
            yield Comparison(f"{levels_name(coded):<22}{density:g}", expected.size, int((dense != expected).sum()))


def format_name(form: MatrixFormat) -> str:
    """Elements, coding and output, as people write them."""
    element, coding, output = form
    coded = " coded" if coding is Coding.EXPONENTS else ""
    return element.name.lower() + coded + (f" to {output.name.lower()}" if output else "")


def levels_name(form: CodedFormat) -> str:
    """Elements, bits of a first code, and whether there is a bitmap, as people write them."""
    element, code_bits, has_bitmap = form
    return f"{element.name.lower()} levels {code_bits}{' bitmap' if has_bitmap else ''}"
