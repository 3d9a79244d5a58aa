"""Short names for the arithmetic of one element type, in which the elementwise rules and the
mathematical functions are written: `a.add(x, y)` emits one instruction on all lanes of an
ElementBuilder."""

from collections.abc import Sequence

from llvmlite import ir

from cokernel.compiler.dtypes import f32, f64, half, i1, i16, i32, i64
from cokernel.compiler.function import ElementBuilder

# For each float type: the integer of its width, and the number of explicit bits of the significand.
FLOAT_BITS: dict[ir.Type, tuple[ir.IntType, int]] = {
    half: (i16, 10),
    f32: (i32, 23),
    f64: (i64, 52),
}

# A register, or a Python number that stands for a constant in every lane.
type Operand = ir.Value | int | float


class FloatArithmetic:
    """Arithmetic on float registers of one scalar type (half, float or double), and on integers of
    the same width.

    Nothing here may be reordered or contracted by LLVM: an operation rounds once, except
    `multiply_add`, which may round its product too where the processor has no fused instruction.
    """

    def __init__(self, builder: ElementBuilder, scalar: ir.Type):
        self.elements = builder
        self.builder = builder.builder
        self.scalar = scalar
        self.integer, self.significand_bits = FLOAT_BITS[scalar]
        self.type = builder.type(scalar)
        self.integer_type = builder.type(self.integer)

    def real(self, value: Operand) -> ir.Value:
        """A float operand as a register."""
        if isinstance(value, ir.Value):
            return value
        return self.elements.constant(self.scalar, float(value))

    def whole(self, value: Operand) -> ir.Value:
        """An integer operand of the float's width as a register."""
        return value if isinstance(value, ir.Value) else self.elements.constant(self.integer, value)

    # Floats.

    def add(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.fadd(self.real(left), self.real(right))

    def subtract(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.fsub(self.real(left), self.real(right))

    def multiply(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.fmul(self.real(left), self.real(right))

    def divide(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.fdiv(self.real(left), self.real(right))

    def negate(self, value: Operand) -> ir.Value:
        return self.builder.fneg(self.real(value))

    def call(self, name: str, *arguments: Operand) -> ir.Value:
        """An LLVM intrinsic from floats to a float, such as "llvm.fabs"."""
        return self.elements.intrinsic(name, self.type, [self.real(item) for item in arguments])

    def multiply_add(self, left: Operand, right: Operand, addend: Operand) -> ir.Value:
        """left * right + addend, fused where that is one instruction."""
        return self.call("llvm.fmuladd", left, right, addend)

    def absolute(self, value: Operand) -> ir.Value:
        return self.call("llvm.fabs", value)

    def copy_sign(self, magnitude: Operand, sign: Operand) -> ir.Value:
        return self.call("llvm.copysign", magnitude, sign)

    def square_root(self, value: Operand) -> ir.Value:
        return self.call("llvm.sqrt", value)

    def polynomial(self, x: Operand, coefficients: Sequence[float]) -> ir.Value:
        """The sum of coefficients[k] * x**k, by Horner's rule."""
        total: Operand = coefficients[-1]
        for coefficient in reversed(coefficients[:-1]):
            total = self.multiply_add(total, x, coefficient)
        return self.real(total)

    def compare(self, operator: str, left: Operand, right: Operand) -> ir.Value:
        """An ordered comparison: false if an operand is NaN."""
        return self.builder.fcmp_ordered(operator, self.real(left), self.real(right))

    def is_nan(self, value: ir.Value) -> ir.Value:
        return self.builder.fcmp_unordered("uno", value, value)

    def select(self, condition: ir.Value, yes: Operand, no: Operand) -> ir.Value:
        return self.builder.select(condition, self.real(yes), self.real(no))

    def both(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Whether two conditions hold. (LLVM may evaluate both: there are no branches here.)"""
        return self.builder.and_(left, right)

    def either(self, left: ir.Value, right: ir.Value) -> ir.Value:
        return self.builder.or_(left, right)

    def is_not(self, condition: ir.Value) -> ir.Value:
        return self.builder.xor(condition, self.elements.constant(i1, 1))

    # Bits.

    def bits(self, value: Operand) -> ir.Value:
        return self.builder.bitcast(self.real(value), self.integer_type)

    def from_bits(self, value: Operand) -> ir.Value:
        return self.builder.bitcast(self.whole(value), self.type)

    def int_add(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.add(self.whole(left), self.whole(right))

    def int_subtract(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.sub(self.whole(left), self.whole(right))

    def int_and(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.and_(self.whole(left), self.whole(right))

    def int_or(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.or_(self.whole(left), self.whole(right))

    def shift_left(self, value: Operand, count: Operand) -> ir.Value:
        return self.builder.shl(self.whole(value), self.whole(count))

    def shift_right(self, value: Operand, count: Operand) -> ir.Value:
        """A logical shift."""
        return self.builder.lshr(self.whole(value), self.whole(count))

    def shift_right_signed(self, value: Operand, count: Operand) -> ir.Value:
        return self.builder.ashr(self.whole(value), self.whole(count))

    def int_select(self, condition: ir.Value, yes: Operand, no: Operand) -> ir.Value:
        return self.builder.select(condition, self.whole(yes), self.whole(no))

    def int_equal(self, left: Operand, right: Operand) -> ir.Value:
        return self.builder.icmp_signed("==", self.whole(left), self.whole(right))

    def is_denormal(self, value: Operand) -> ir.Value:
        """Whether a number is zero or smaller than the smallest normal one, whatever the processor
        takes such numbers for."""
        smallest_normal = self.whole(1 << self.significand_bits)
        return self.builder.icmp_unsigned("<", self.bits(self.absolute(value)), smallest_normal)

    def power_of_two(self, exponent: ir.Value) -> ir.Value:
        """2.0 ** exponent for an integer exponent of a normal result."""
        bias = (1 << (self.integer.width - self.significand_bits - 2)) - 1
        return self.from_bits(self.shift_left(self.int_add(exponent, bias), self.significand_bits))

    # Between widths.

    def widened(self, value: ir.Value) -> tuple["FloatArithmetic", ir.Value]:
        """The arithmetic of doubles, and a float register as one."""
        double = FloatArithmetic(self.elements, f64)
        return double, self.builder.fpext(value, double.type)

    def widened_exactly(self, value: ir.Value) -> tuple["FloatArithmetic", ir.Value]:
        """The same where a processor that takes denormals for zeros must not do so."""
        double, wide = self.widened(value)
        magnitude = self.builder.uitofp(self.bits(self.absolute(value)), double.type)
        least = 2.0 ** (2 - (1 << (self.integer.width - self.significand_bits - 2)))
        size = double.multiply(magnitude, least * 2.0**-self.significand_bits)
        return double, double.select(self.is_denormal(value), double.copy_sign(size, wide), wide)

    def narrowed(self, double: ir.Value) -> ir.Value:
        """A double rounded to this arithmetic's type."""
        return self.builder.fptrunc(double, self.type)


def call_per_lane(
    builder: ElementBuilder, name: str, scalar: ir.Type, *arguments: ir.Value
) -> ir.Value:
    """Calls a function of the C library, from scalars to a scalar of one type, on each lane."""
    emit = builder.builder
    callee = builder.function.external(name, scalar, [scalar] * len(arguments))
    if builder.count == 1:
        return emit.call(callee, list(arguments))
    result: ir.Value = ir.Constant(ir.VectorType(scalar, builder.count), ir.Undefined)
    for lane in range(builder.count):
        position = ir.Constant(i32, lane)
        element = emit.call(callee, [emit.extract_element(item, position) for item in arguments])
        result = emit.insert_element(result, element, position)
    return result
