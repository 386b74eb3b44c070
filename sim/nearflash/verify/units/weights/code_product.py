"""Vectors of the code product, between an fp32 number and a sum, as the dequantizer has it."""

from typing import Any

import numpy as np
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.formats import BF16, FP16, FP32, INT8
from nearflash.gateware.fp.add import Add
from nearflash.gateware.fp.pipeline import delay
from nearflash.gateware.fp.raw import Pack, Unpack
from nearflash.gateware.weights.code_product import CodeProduct
from nearflash.model.fp.add import add
from nearflash.model.fp.convert import from_narrow
from nearflash.model.fp.mul import mul
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "ObservedProduct", "vectors"]

_VECTORS = 20_000


class ObservedProduct(wiring.Component):
    """o = code · scale + addend, in fp32 patterns: the sum looks at all bits of the product."""

    LATENCY = Unpack.LATENCY + CodeProduct.LATENCY + Add().LATENCY + Pack.LATENCY

    def __init__(self) -> None:
        number = In(FP32.bits)
        super().__init__({"code": In(INT8.bits), "scale": number, "addend": number, "o": Out(FP32.bits)})

    def elaborate(self, platform: Any) -> Module:
        """Build the units."""
        m = Module()
        m.submodules.scale, m.submodules.addend = scale, addend = Unpack(), Unpack()
        m.submodules.product = product = CodeProduct()
        m.submodules.add = total = Add()
        m.submodules.pack = pack = Pack()
        m.d.comb += [
            scale.i.eq(self.scale),
            addend.i.eq(self.addend),
            product.code.eq(delay(m, self.code, scale.LATENCY)),
            product.scale.eq(scale.o),
            total.a.eq(product.o),
            total.b.eq(delay(m, addend.o, product.LATENCY)),
            pack.i.eq(total.o),
            self.o.eq(pack.o),
        ]
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Scales and addends of fp16 or of bf16: any patterns, products of zero and past the range, sums that cancel."""
    scale, addend = (_patterns(rng) for _ in range(2))
    code = (rng.integers(0, 256, _VECTORS) >> rng.integers(0, 9, _VECTORS)).astype(np.uint8)
    product, _ = mul(code.astype(np.float32).view(np.uint32), scale)
    cancels = rng.integers(0, 4, _VECTORS) == 0
    addend = np.where(cancels, (product ^ np.uint32(1 << 31)) & np.uint32(0xFFFF << 16), addend)
    return {"code": code, "scale": scale, "addend": addend}, {"o": add(product, addend)[0]}


def _patterns(rng: np.random.Generator) -> NDArray[np.uint32]:
    """fp32 patterns of numbers of both formats; one of eight has a special exponent."""
    bits = rng.integers(0, 1 << 16, _VECTORS, np.uint16)
    fp16, bf16 = from_narrow(bits, FP16), from_narrow(bits, BF16)
    special = rng.integers(0, 16, _VECTORS)
    bf16 = np.where(special == 0, bf16 & np.uint32(0x807F0000), bf16)
    bf16 = np.where(special == 1, bf16 & np.uint32(0xFFFF0000) | np.uint32(0x7F000000), bf16)
    return np.where(rng.integers(0, 2, _VECTORS) == 0, fp16, bf16)


TARGET = Target(ObservedProduct, vectors, part="product", batches=3)
