"""What a quantiser reads: a plain matrix, or the operands of the operation that it is fused with.

Enters: pointers of one of four sources. Leaves: pairs of neighbouring columns, with exactly the BF16 values which the unfused path would
have written to memory and read back.
Equations, [R, C] each: plain x; norm bf16(x * rstd * weight) with rstd = 1 / sqrt(mean(x^2) + eps), FP32 inside;
swiglu bf16(bf16(gate / (1 + exp(-gate))) * up) with x = [gate | up]; swiglu_grad bf16 of [d_gate | d_up] as swiglu.py has them, from the
same x and dh. The inner roundings are those of the rollout engine's own kernels.
No product here meets a sum that a compiler could contract with it (where one is wanted, it is written as `fma`): two kernels that call the
same function get the same bits.
A pair is (a, b): where `F.plain`, a and b are the FP32 values of columns 2 p and 2 p + 1; else both are one tensor of 32-bit words that
hold two BF16 values each, which halves registers and lets one instruction compare two.

Legend: R rows, C columns of the quantised matrix; p indexes pairs of columns.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from jetrl_megatron.fp8.triton_cast import near_inverse

PLAIN, NORM, SWIGLU, SWIGLU_GRAD = 0, 1, 2, 3
"""Kinds of source."""


@dataclass(frozen=True, eq=False)
class Source:
    """One operand set; unused pointers repeat x."""

    kind: int
    x: torch.Tensor
    """[R, C], rows contiguous; [R, 2C] for swiglu. swiglu_grad: [R, C] gate and up, C a multiple of 256."""
    cols: int
    """C."""
    row_aux: torch.Tensor | None = None
    """norm: rstd [R, 1] float32; swiglu_grad: dh [R, C / 2], rows contiguous."""
    weight: torch.Tensor | None = None
    """norm: [C] bfloat16."""

    @property
    def paired(self) -> bool:
        """Whether two BF16 columns can be read as one aligned 32-bit word."""
        weight_aligned = self.weight is None or self.weight.data_ptr() % 4 == 0
        grad = self.row_aux if self.kind == SWIGLU_GRAD else None
        even = self.cols % 2 == 0 and all(t.stride(0) % 2 == 0 and t.data_ptr() % 4 == 0 for t in (self.x, grad) if t is not None)
        return self.x.dtype is torch.bfloat16 and even and weight_aligned

    def arguments(self) -> tuple[object, ...]:
        """The leading arguments of every kernel: x, aux, weight, rows, cols, then the strides between rows of x and aux."""
        aux = self.x if self.row_aux is None else self.row_aux
        weight = self.x if self.weight is None else self.weight
        return self.x, aux, weight, self.x.shape[0], self.cols, self.x.stride(0), aux.stride(0)


@triton.jit
def round_bf16(x, SOFT: tl.constexpr):
    """FP32 values rounded to nearest even BF16, in FP32."""
    if SOFT:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = tl.where(x == x, nearest, bits).to(tl.float32, bitcast=True)
    else:
        rounded = x.to(tl.bfloat16, fp_downcast_rounding="rtne").to(tl.float32)
    return rounded


@triton.jit
def read_pair(ptr, offset, p, mask, cols, F: tl.constexpr, EVEN: tl.constexpr):
    """FP32 values of columns 2 p and 2 p + 1 behind ptr + offset; zero where masked or at columns from cols on."""
    if F.plain:
        first = mask & (2 * p < cols)
        second = mask & (2 * p + 1 < cols)
        a = tl.load(ptr + offset + 2 * p, mask=first, other=0.0).to(tl.float32)
        b = tl.load(ptr + offset + 2 * p + 1, mask=second, other=0.0).to(tl.float32)
    else:
        words = read_words(ptr, offset, p, mask, cols, EVEN)
        a = (words << 16).to(tl.float32, bitcast=True)
        b = (words & -65536).to(tl.float32, bitcast=True)
    return a, b


@triton.jit
def read_words(ptr, offset, p, mask, cols, EVEN: tl.constexpr):
    """The same two BF16 columns as one 32-bit word; offset and cols are even."""
    words_ptr = ptr.to(tl.pointer_type(tl.int32)) + offset // 2 + p
    return tl.load(words_ptr) if EVEN else tl.load(words_ptr, mask=mask & (2 * p < cols), other=0)


@triton.jit
def inverse_of_one_plus_exp(x, SOFT: tl.constexpr):
    """4 / (1 + exp(x)) in FP32, and a quarter of 1 + exp(x); the factor keeps the inverse of a large sum a normal number.

    The inverse is right to 2 ulp of the sum as it was computed; exp(x) itself is off by up to |x| * 2^-24 of its value.
    """
    if SOFT:
        quarter = 0.25 * (1.0 + tl.exp(x))
        inverse = 1.0 / quarter
    else:
        power: tl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
        exp = tl.inline_asm_elementwise(power, "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1)
        quarter = tl.fma(exp, tl.full(x.shape, 0.25, tl.float32), tl.full(x.shape, 0.25, tl.float32))
        inverse = near_inverse(quarter)
    return inverse, quarter


@triton.jit
def silu(gate, SOFT: tl.constexpr):
    """gate / (1 + exp(-gate)) in FP32, before its rounding to BF16.

    On a GPU the quotient gets one correction, which makes it the division of gate by the sum as computed. After rounding, every finite BF16
    gate from 2^-125 on has torch's value (tests/gpu/test_swiglu_kernels.py asks all of them), in a quarter of a division's instructions.
    """
    if SOFT:
        q = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    else:
        inverse, quarter = inverse_of_one_plus_exp(-gate, SOFT)
        part = gate * 0.25
        q = part * inverse
        rest = tl.fma(-q, quarter, part)
        q = tl.where(rest == rest, tl.fma(rest, inverse, q), q)  # NaN behind an infinite gate or sum, where q is right
    return q


@triton.jit
def d_silu(gate, SOFT: tl.constexpr):
    """Derivative of silu before its rounding: sigmoid * (1 + gate * (1 - sigmoid)), FP32."""
    inverse, _ = inverse_of_one_plus_exp(-gate, SOFT)
    sigmoid = inverse * 0.25
    return sigmoid * tl.fma(gate, 1.0 - sigmoid, tl.full(gate.shape, 1.0, tl.float32))


@triton.jit
def rounded_silu(gate_a, gate_b, F: tl.constexpr):
    """silu of both columns of a pair, rounded to BF16, in FP32."""
    a, b = join_pair(silu(gate_a, F.soft), silu(gate_b, F.soft), F)
    return split_pair(a, b, False, F)


@triton.jit
def load_pairs(x_ptr, aux_ptr, weight_ptr, r, p, rows, cols, half, x_stride, aux_stride_r, KIND: tl.constexpr, EVEN: tl.constexpr,
               F: tl.constexpr):  # fmt: skip
    """Rows r and column pairs p of the source behind pointers that `tile_at` gave, as a pair; zero from rows and cols on.

    EVEN: no element is outside. half: swiglu: columns between a gate and its up.
    """
    in_rows = (r < rows)[:, None]
    offset = r[:, None] * x_stride
    if KIND == 0 and not F.plain:
        a = read_words(x_ptr, offset, p[None, :], in_rows, cols, EVEN)
        b = a
    else:
        a, b = read_pair(x_ptr, offset, p[None, :], in_rows, cols, F, EVEN)
        if KIND == 1:
            rstd = tl.load(aux_ptr + r * aux_stride_r, mask=r < rows, other=0.0)[:, None]
            weight_a, weight_b = read_pair(weight_ptr, 0, p[None, :], p[None, :] >= 0, cols, F, EVEN)
            a, b = join_pair(a * rstd * weight_a, b * rstd * weight_b, F)
            if not EVEN:  # 0 times a negative weight is -0
                a, b = tl.where(in_rows, a, 0), tl.where(in_rows, b, 0)
        elif KIND == 2:
            up_a, up_b = read_pair(x_ptr + half, offset, p[None, :], in_rows, cols, F, EVEN)
            gate_a, gate_b = rounded_silu(a, b, F)
            a, b = join_pair(gate_a * up_a, gate_b * up_b, F)
    return a, b


@triton.jit
def tile_at(x_ptr, aux_ptr, weight_ptr, first_r, first_c, x_stride, aux_stride_r, KIND: tl.constexpr):
    """The pointers of a source moved to row first_r and column first_c (64 bit): offsets inside a tile then fit 32 bits."""
    x_ptr += first_r * x_stride + first_c
    if KIND == 1:
        aux_ptr += first_r * aux_stride_r
        weight_ptr += first_c
    elif KIND == 3:
        aux_ptr += first_r * aux_stride_r + first_c
    return x_ptr, aux_ptr, weight_ptr


@triton.jit
def load_tile(x_ptr, aux_ptr, weight_ptr, rows, cols, half, x_stride, aux_stride_r, gate, KIND: tl.constexpr, EVEN: tl.constexpr,
              F: tl.constexpr):  # fmt: skip
    """The pairs of the four parts of a 128x128 tile, part j with the rows 4 i + j, behind pointers that `tile_at` gave.

    gate: of swiglu_grad, whether the tile is one of d_gate or of d_up.
    """
    r, p = 4 * tl.arange(0, 32), tl.arange(0, 64)
    if KIND == 3:
        if gate:
            a0, b0 = load_d_gate(x_ptr, aux_ptr, r, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a1, b1 = load_d_gate(x_ptr, aux_ptr, r + 1, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a2, b2 = load_d_gate(x_ptr, aux_ptr, r + 2, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a3, b3 = load_d_gate(x_ptr, aux_ptr, r + 3, p, rows, half, x_stride, aux_stride_r, EVEN, F)
        else:
            a0, b0 = load_d_up(x_ptr, aux_ptr, r, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a1, b1 = load_d_up(x_ptr, aux_ptr, r + 1, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a2, b2 = load_d_up(x_ptr, aux_ptr, r + 2, p, rows, half, x_stride, aux_stride_r, EVEN, F)
            a3, b3 = load_d_up(x_ptr, aux_ptr, r + 3, p, rows, half, x_stride, aux_stride_r, EVEN, F)
    else:
        a0, b0 = load_pairs(x_ptr, aux_ptr, weight_ptr, r, p, rows, cols, half, x_stride, aux_stride_r, KIND, EVEN, F)
        a1, b1 = load_pairs(x_ptr, aux_ptr, weight_ptr, r + 1, p, rows, cols, half, x_stride, aux_stride_r, KIND, EVEN, F)
        a2, b2 = load_pairs(x_ptr, aux_ptr, weight_ptr, r + 2, p, rows, cols, half, x_stride, aux_stride_r, KIND, EVEN, F)
        a3, b3 = load_pairs(x_ptr, aux_ptr, weight_ptr, r + 3, p, rows, cols, half, x_stride, aux_stride_r, KIND, EVEN, F)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def load_d_gate(x_ptr, dh_ptr, r, p, rows, half, x_stride, dh_stride, EVEN: tl.constexpr, F: tl.constexpr):
    """Rows r and column pairs p of d_gate behind pointers that `tile_at` gave, as a pair; zero from rows on. half: F columns of dh."""
    in_rows, offset, p, cols = (r < rows)[:, None], r[:, None] * x_stride, p[None, :], half
    gate_a, gate_b = read_pair(x_ptr, offset, p, in_rows, cols, F, EVEN)
    up_a, up_b = read_pair(x_ptr + half, offset, p, in_rows, cols, F, EVEN)
    dh_a, dh_b = read_pair(dh_ptr, r[:, None] * dh_stride, p, in_rows, cols, F, EVEN)
    return join_pair(dh_a * up_a * d_silu(gate_a, F.soft), dh_b * up_b * d_silu(gate_b, F.soft), F)


@triton.jit
def load_d_up(x_ptr, dh_ptr, r, p, rows, half, x_stride, dh_stride, EVEN: tl.constexpr, F: tl.constexpr):
    """The same of d_up."""
    in_rows, p = (r < rows)[:, None], p[None, :]
    gate_a, gate_b = read_pair(x_ptr, r[:, None] * x_stride, p, in_rows, half, F, EVEN)
    dh_a, dh_b = read_pair(dh_ptr, r[:, None] * dh_stride, p, in_rows, half, F, EVEN)
    act_a, act_b = rounded_silu(gate_a, gate_b, F)
    return join_pair(dh_a * act_a, dh_b * act_b, F)


@triton.jit
def join_pair(a, b, F: tl.constexpr):
    """FP32 values, rounded to BF16, as a pair."""
    if F.plain:
        first, second = round_bf16(a, F.soft), round_bf16(b, F.soft)
    else:
        join: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        first = tl.inline_asm_elementwise(join, "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1)
        second = first
    return first, second


@triton.jit
def split_pair(a, b, AGAIN: tl.constexpr, F: tl.constexpr):
    """The FP32 values of both columns of a pair.

    AGAIN: by other instructions, which the assembler does not recognise as the same values: it then keeps the words in registers and not
    the values, and more programs fit on a multiprocessor.
    """
    if F.plain:
        first, second = a, b
    elif AGAIN:
        shift: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        first, second = tl.inline_asm_elementwise(shift, "=r,=r,r", [a], dtype=(tl.float32, tl.float32), is_pure=False, pack=1)
    else:
        permute: tl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
        first, second = tl.inline_asm_elementwise(permute, "=r,=r,r", [a], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
    return first, second
