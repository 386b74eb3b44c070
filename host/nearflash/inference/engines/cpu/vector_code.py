"""What vector loops are written with: LLVM code for numba's intrinsics, of vectors of `lanes` numbers."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array

__all__ = ["LOG2E", "Code"]

LOG2E = 1.4426950408889634
_Float, _Int, _Byte = ir.FloatType(), ir.IntType(32), ir.IntType(8)


class Code:
    """`args`: data of the arrays among an intrinsic's arguments, else the arguments; `b`: llvmlite's builder."""

    flags: ClassVar = ("contract", "reassoc", "nsz")
    """Sums may be taken in any order, products be added without rounding."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Sequence[Any], lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.args = [
            make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, values, strict=True)
        ]

    @classmethod
    def generator(cls, write: Callable[["Code"], Any], lanes: int) -> Callable[..., Any]:
        """What numba calls to have the code of an intrinsic; what `write` returns is its value, if that is any."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            result = write(cls(context, builder, signature, values, lanes))
            return context.get_dummy_value() if result is None else result

        return generate

    @classmethod
    def function(cls, name: str, write: Callable[["Code"], None], lanes: int) -> Callable[..., Any]:
        """As `generator`, as a function of this name: long code is there once, not in every loop that calls it.

        (Within its callers, and theirs, LLVM took minutes for it.)
        """

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            code = cls(context, builder, signature, values, lanes)
            given, kind = code.args, ir.FunctionType(ir.VoidType(), [one.type for one in code.args])
            made = builder.module.globals.get(name)
            if made is None:
                made = ir.Function(builder.module, kind, name)
                made.linkage = "linkonce_odr"
                made.attributes.add("noinline")
                code.b, code.args = ir.IRBuilder(made.append_basic_block("entry")), list(made.args)
                write(code)
                code.b.ret_void()
            builder.call(made, given)
            return context.get_dummy_value()

        return generate

    # Places

    def at(self, place: int) -> Any:
        """A constant place or count."""
        return ir.Constant(ir.IntType(64), place)

    def place(self, first: Any, between: Any, number: int, offset: Any = None) -> Any:
        """first + number·between + offset."""
        place = self.b.add(first, self.b.mul(between, self.at(number)))
        return place if offset is None else self.b.add(place, offset)

    def load(self, data: Any, place: Any, kind: Any, align: int) -> Any:
        """A vector of elements of this type from a place on."""
        return self.b.load(self.b.bitcast(self.b.gep(data, [place]), self.of(kind).as_pointer()), align=align)

    def floats(self, data: Any, place: Any) -> Any:
        """fp32 numbers."""
        return self.load(data, place, _Float, 4)

    def halves(self, data: Any, place: Any) -> Any:
        """fp16 numbers as fp32."""
        return self.b.fpext(self.load(data, place, ir.HalfType(), 2), self.of(_Float))

    def all(self, data: Any, place: Any) -> Any:
        """The element at this place, in all lanes."""
        return self.splat(self.b.load(self.b.gep(data, [place])))

    def store(self, data: Any, place: Any, vector: Any) -> None:
        """fp32 numbers to this place on."""
        self.b.store(vector, self.b.bitcast(self.b.gep(data, [place]), vector.type.as_pointer()), align=4)

    def fetch(self, data: Any, place: Any, *, soon: bool) -> None:
        """Ask for the cache line, into the first cache or the second; the place need not be there."""
        kind = ir.FunctionType(ir.VoidType(), [_Byte.as_pointer(), _Int, _Int, _Int])
        call = self.b.module.declare_intrinsic("llvm.prefetch", [_Byte.as_pointer()], kind)
        address = self.b.bitcast(self.b.gep(data, [place]), _Byte.as_pointer())
        self.b.call(call, [address, _Int(0), _Int(3 if soon else 2), _Int(1)])

    def variable(self, value: Any) -> Any:
        """With this value at first."""
        place = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    # Vectors

    def of(self, kind: Any) -> Any:
        """The vector of such elements."""
        return ir.VectorType(kind, self.lanes)

    def splat(self, one: Any) -> Any:
        """An element in all lanes."""
        vector = self.b.insert_element(ir.Constant(self.of(one.type), ir.Undefined), one, _Int(0))
        return self.pick(vector, vector, [0] * self.lanes)

    def constant(self, kind: Any, value: float) -> Any:
        """A constant in all lanes."""
        return ir.Constant(self.of(kind), [value] * self.lanes)

    def zeros(self) -> Any:
        """fp32 zeros."""
        return self.constant(_Float, 0.0)

    def pick(self, x: Any, y: Any, lanes: Sequence[int]) -> Any:
        """Lanes of x and y, those of y from `lanes` on."""
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_Int, self.lanes), list(lanes)))

    def low_bits(self, x: Any, bits: int) -> Any:
        """The lower bits of int32 numbers."""
        return self.b.and_(x, self.constant(_Int, (1 << bits) - 1))

    def shifted(self, x: Any, bits: int) -> Any:
        """int32 numbers without their lower bits."""
        return self.b.lshr(x, self.constant(_Int, bits))

    def add(self, x: Any, y: Any) -> Any:
        """x + y."""
        return self.b.fadd(x, y, flags=self.flags)

    def add_to(self, sums: Any, x: Any, y: Any) -> None:
        """Sums, in a variable, += x·y."""
        self.b.store(self.add(self.b.load(sums), self.b.fmul(x, y, flags=self.flags)), sums)

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of each two."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp(self, x: Any, polynomial: Sequence[np.float32]) -> Any:
        """e^x of x <= 0, as compiled.exp; the polynomial is that of 2^f."""
        b, floats, ints = self.b, self.of(_Float), self.of(_Int)
        least = self.constant(_Float, -87.0)
        y = b.fmul(self.larger(x, least), self.constant(_Float, LOG2E))
        floor = ir.FunctionType(floats, [floats])
        n = b.call(
            cgutils.get_or_insert_function(b.module, floor, f"llvm.floor.v{self.lanes}f32"),
            [self.add(y, self.constant(_Float, 0.5))],
        )
        f, p = b.fsub(y, n), self.constant(_Float, float(polynomial[0]))
        for factor in polynomial[1:]:
            p = self.add(b.fmul(p, f, flags=self.flags), self.constant(_Float, float(factor)))
        bits = b.shl(b.add(b.fptosi(n, ints), self.constant(_Int, 127)), self.constant(_Int, 23))
        return b.select(b.fcmp_ordered(">", x, least), b.fmul(p, b.bitcast(bits, floats)), self.zeros())

    # Lanes together

    def reduced(self, x: Any, two: Callable[[Any, Any], Any]) -> Any:
        """One number of all lanes, two of which `two` makes one."""
        step = self.lanes // 2
        while step:
            x = two(x, self.pick(x, x, [(lane + step) % self.lanes for lane in range(self.lanes)]))
            step //= 2
        return self.b.extract_element(x, _Int(0))

    def folded(self, vectors: list[Any]) -> Any:
        """A vector of the sums of the lanes of as many vectors as there are lanes, by a tree of additions.

        The first two steps stay within four lanes, which processors shuffle at once.
        """
        lanes = range(self.lanes)
        vectors = self._halved(vectors, [lane // 4 * 4 + lane % 4 // 2 + self.lanes * (lane % 2) for lane in lanes], 2)
        vectors = self._halved(vectors, [lane // 4 * 4 + lane % 2 + self.lanes * (lane % 4 // 2) for lane in lanes], 2)
        while len(vectors) > 1:
            vectors = self._halved(vectors, [lane // 4 * 8 + lane % 4 for lane in lanes], 4)
        return vectors[0]

    def _halved(self, vectors: list[Any], low: list[int], step: int) -> list[Any]:
        """Of each two, the sum of their lanes `low` and of those `step` behind."""
        high = [place + step for place in low]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        return [self.add(self.pick(x, y, low), self.pick(x, y, high)) for x, y in pairs]
