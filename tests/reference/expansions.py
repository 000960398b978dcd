"""Low-precision numbers as exact rationals: decoding, rounding and the transformations, from the definitions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Layout:
    """A binary format with subnormals, given by its field widths."""

    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self):
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def smallest_exponent(self):
        """The exponent of the last bit of a subnormal."""
        return 1 - self.bias - self.mantissa_bits

    @property
    def largest(self):
        return (2 - Fraction(1, 1 << self.mantissa_bits)) * Fraction(2) ** self.bias

    def decode(self, bits):
        """The exact value of a finite bit pattern."""
        mantissa = bits & ((1 << self.mantissa_bits) - 1)
        field = (bits >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        sign = -1 if bits >> (self.mantissa_bits + self.exponent_bits) else 1
        if field == (1 << self.exponent_bits) - 1:
            raise OverflowError(f"{bits:x} is not finite")
        if field:
            mantissa += 1 << self.mantissa_bits
        return sign * mantissa * Fraction(2) ** (max(field, 1) - 1 + self.smallest_exponent)

    def exponent_of_ulp(self, value):
        """The exponent of the last bit of the binade that holds a value (a Fraction)."""
        if value == 0:
            return self.smallest_exponent
        magnitude = abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        return max(exponent - self.mantissa_bits, self.smallest_exponent)

    def round(self, value):
        """The nearest representable value, ties to even; OverflowError beyond the largest."""
        unit = Fraction(2) ** self.exponent_of_ulp(value)
        quotient = value / unit
        below = math.floor(quotient)
        rest = quotient - below
        if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1):
            below += 1
        rounded = below * unit
        if abs(rounded) > self.largest:
            raise OverflowError(f"{float(value)} overflows")
        return rounded


LAYOUTS = {"bfloat16": Layout(8, 7), "float16": Layout(5, 10), "float32": Layout(8, 23)}


def two_sum(layout, a, b):
    """The rounded sum and its exact error: the definition, with no algorithm in it."""
    s = layout.round(a + b)
    return s, a + b - s


def two_product(layout, a, b):
    p = layout.round(a * b)
    return p, layout.round(a * b - p)


def fast_two_sum(layout, a, b):
    """Dekker's three operations, each rounded: unordered operands give what the algorithm gives."""
    s = layout.round(a + b)
    return s, layout.round(b - layout.round(s - a))


def grow(layout, x, y, a):
    u, v = two_sum(layout, x, a)
    return fast_two_sum(layout, u, layout.round(v + y))


def multiply_expansions(layout, a_hi, a_lo, b_hi, b_lo):
    p, e = two_product(layout, a_hi, b_hi)
    cross = layout.round(layout.round(a_hi * b_lo) + layout.round(a_lo * b_hi))
    return fast_two_sum(layout, p, layout.round(e + cross))


OPERATIONS: dict[str, Callable] = {
    "two_sum": two_sum,
    "fast_two_sum": fast_two_sum,
    "two_product": two_product,
    "grow": grow,
    "multiply_expansions": multiply_expansions,
}
