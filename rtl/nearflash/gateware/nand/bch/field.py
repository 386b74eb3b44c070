"""GF(2^13) at elaboration time and in gates: elements are integers, bit k the coefficient of alpha^k."""

from amaranth.hdl import Cat, Module, Value

from nearflash.abi.attention.codeword import BCH_BITS, BCH_ERRORS, BCH_POLYNOMIAL
from nearflash.gateware.fp.pipeline import wire

__all__ = ["coordinates", "element", "generator", "minimal_polynomial", "multiply", "power", "scaling", "square"]

_ORDER = (1 << BCH_BITS) - 1


def _powers() -> list[int]:
    powers = [1]
    for _ in range(_ORDER - 1):
        shifted = powers[-1] << 1
        powers.append(shifted ^ (shifted >> BCH_BITS) * BCH_POLYNOMIAL)
    return powers


_POWERS = _powers()
_LOGARITHMS = {element: exponent for exponent, element in enumerate(_POWERS)}


def power(exponent: int) -> int:
    """alpha^exponent, of negative exponents too."""
    return _POWERS[exponent % _ORDER]


def scaling(exponent: int) -> list[int]:
    """The linear map that multiplies by alpha^exponent (see nearflash.gateware.coding.linear)."""
    return [power(exponent + k) for k in range(BCH_BITS)]


def square() -> list[int]:
    """The linear map that squares."""
    return [power(2 * k) for k in range(BCH_BITS)]


def _with_roots(exponents: set[int]) -> int:
    """The product of (x - alpha^exponent), bit k the coefficient of x^k; the exponents are closed under doubling."""
    coefficients = [1]
    for root in exponents:
        scaled = [c and power(_LOGARITHMS[c] + root) for c in coefficients]
        coefficients = [a ^ b for a, b in zip([0, *coefficients], [*scaled, 0], strict=True)]
    return sum(c << k for k, c in enumerate(coefficients))


def minimal_polynomial(i: int) -> int:
    """Compute the minimal polynomial of alpha^i, and of its conjugates."""
    return _with_roots({(i << k) % _ORDER for k in range(BCH_BITS)})


def generator() -> int:
    """g(x), bit k the coefficient of x^k: its roots are the conjugates of alpha, alpha^3, …, alpha^31."""
    return _with_roots({(i << k) % _ORDER for i in range(1, 2 * BCH_ERRORS, 2) for k in range(BCH_BITS)})


def coordinates(i: int) -> list[int]:
    """Coordinates of alpha^(i·n), n = 0 … 8190, in the powers 1, b, …, b^12 of b = alpha^(64·i).

    alpha^i is b^128, for alpha^8192 is alpha; and b^m is x^m modulo the minimal polynomial of b, that of alpha^i too.
    """
    polynomial, powers = minimal_polynomial(i), [1]
    for _ in range(_ORDER - 1):
        shifted = powers[-1] << 1
        powers.append(shifted ^ (shifted >> BCH_BITS) * polynomial)
    return [powers[128 * n % _ORDER] for n in range(_ORDER)]


def element(i: int) -> list[int]:
    """The linear map from coordinates in the powers of alpha^(64·i) to the element."""
    return [power(64 * i * k) for k in range(BCH_BITS)]


def multiply(m: Module, a: Value, b: Value) -> Value:
    """a·b, combinational: the partial products, then the reduction of degrees 13 to 24."""
    partial = [
        wire(m, Cat(a[k] & b[n - k] for k in range(BCH_BITS) if 0 <= n - k < BCH_BITS).xor())
        for n in range(2 * BCH_BITS - 1)
    ]
    return Cat(Cat(bit for n, bit in enumerate(partial) if power(n) >> row & 1).xor() for row in range(BCH_BITS))
