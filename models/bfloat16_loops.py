"""CPU products of few rows in bfloat16, of AVX-512's own instruction, which numba compiles.

A pass of decoding reads all weights for a few rows. oneDNN's products take the memory's time, then
that of the arithmetic. Here the next weights come while these are multiplied, so up to `MOST` rows
take hardly longer than one (docs/lab_notes/small.md). A row's sums run in the order of its inputs,
two at a time: its bits do not depend on the rows beside it.

numba has neither the type nor the instruction, so `multiply_group` is written for LLVM.
"""

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from models.loops import add_and_norm, compiled, number, rms_norm, rotated_attention
from models.loops import bits as rounded

LANES = 16  # sums of a register
GROUP = 2 * LANES  # outputs whose weights are stored together, a register of both after the other
MOST = 14  # rows whose sums fit into the 32 registers, with the weights
CHUNK = 18 * MOST  # rows that stay in a core's cache while all weights pass
AHEAD = 2048  # bytes between the weights that are multiplied and those that are fetched


class BFloat16(ir.types.Type):
    """The type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_WORD, _ADDRESS, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
_PAIRS, _ROUNDED = ir.VectorType(BFloat16(), 2 * LANES), ir.VectorType(BFloat16(), LANES)
_BITS = ir.VectorType(ir.IntType(16), LANES)
_REGISTER = 64  # bytes


def runs() -> bool:
    """Return whether this CPU has the instruction, and no better one (AMX, left to oneDNN)."""
    known = llvm.get_host_cpu_features()
    return bool(known.get("avx512bf16")) and not known.get("amx-bf16")


@intrinsic
def multiply_group(typing, count, rows, row_size, weight, pairs, bias, out, out_size):
    """Compute the outputs of a group of weights for 1 to MOST rows; addresses and sizes in bytes.

    Args:
        count: Rows.
        rows, row_size: The first row, and how far the next one is.
        weight, pairs: The group's weights, and pairs of inputs that each output has.
        bias: Of the group's outputs, in float32.
        out, out_size: The first row's outputs, and how far the next one's are.
    """
    return types.void(*[types.intp] * 8), _by_count


def _by_count(context, builder, signature, given):
    """Write the code of each number of rows, which keeps all sums in registers."""
    end = builder.append_basic_block("end")
    cases = builder.switch(given[0], end)
    for count in range(1, MOST + 1):
        block = builder.append_basic_block(f"rows_{count}")
        cases.add_case(_ADDRESS(count), block)
        builder.position_at_end(block)
        _multiply(builder, count, *given[1:])
        builder.branch(end)
    builder.position_at_end(end)
    return context.get_dummy_value()


def _multiply(builder, count, rows, row_size, weight, pairs, bias, out, out_size):
    """Write sum_k rows[r, k] weight[o, k] + bias[o] of so many rows and a group's outputs o."""
    add = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",  # sums + the products of two inputs each
    )
    fetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _WORD, _WORD, _WORD]),
        "llvm.prefetch.p0",
    )

    def at(address, offset, kind):
        return builder.inttoptr(builder.add(address, offset), kind.as_pointer())

    registers = [_ADDRESS(_REGISTER * i) for i in range(GROUP // LANES)]
    lines = [builder.mul(row_size, _ADDRESS(r)) for r in range(count)]
    before, loop = builder.block, builder.append_basic_block("inputs")
    after = builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    pair = builder.phi(_ADDRESS)
    sums = [[builder.phi(_SUMS) for _ in registers] for _ in lines]
    here = builder.add(weight, builder.mul(pair, _ADDRESS(_REGISTER * len(registers))))
    weights = []
    for register in registers:
        read = builder.load(at(here, register, _WORDS), align=_REGISTER)
        weights.append(builder.bitcast(read, _PAIRS))
        later = builder.inttoptr(
            builder.add(here, builder.add(register, _ADDRESS(AHEAD))), cgutils.voidptr_t
        )
        builder.call(fetch, [later, _WORD(0), _WORD(3), _WORD(1)])  # to read, for all caches, data
    inputs = builder.add(rows, builder.mul(pair, _ADDRESS(4)))
    added = []
    for line, row in zip(lines, sums):
        two = builder.load(at(inputs, line, _WORD), align=4)
        one = builder.insert_element(_WORDS(ir.Undefined), two, _WORD(0))
        all = builder.shuffle_vector(one, _WORDS(ir.Undefined), _WORDS([0] * LANES))
        both = builder.bitcast(all, _PAIRS)
        added.append([builder.call(add, [s, both, w]) for s, w in zip(row, weights)])
    following = builder.add(pair, _ADDRESS(1))
    pair.add_incoming(_ADDRESS(0), before)
    pair.add_incoming(following, loop)
    for row, new in zip(sums, added):
        for s, n in zip(row, new):
            s.add_incoming(_SUMS([0.0] * LANES), before)
            s.add_incoming(n, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)

    builder.position_at_end(after)
    biases = [builder.load(at(bias, register, _SUMS), align=4) for register in registers]
    for r, row in enumerate(added):
        line = builder.add(out, builder.mul(out_size, _ADDRESS(r)))
        for i, (s, b) in enumerate(zip(row, biases)):
            sum = builder.fptrunc(builder.fadd(s, b), _ROUNDED)
            builder.store(
                builder.bitcast(sum, _BITS), at(line, _ADDRESS(2 * LANES * i), _BITS), align=2
            )


@compiled(parallel=True)
def product(rows, weight, bias, out, threads):
    """Compute rows [n, D] times weights, plus a bias in float32 [O], into `out` [n, O].

    Args:
        rows, out: Bits of bfloat16 numbers. O is a multiple of GROUP, D is even.
        weight: Bits [O / GROUP, D / 2, GROUP, 2], in memory from a multiple of 64 bytes on.
        bias: [O].
        threads: How many compute.
    """
    (count, size), outputs, groups = rows.shape, out.shape[1], len(weight)
    for thread in numba.prange(threads):
        for first in range(0, count, CHUNK):
            last = min(count, first + CHUNK)
            parts = (last - first + MOST - 1) // MOST
            for g in range(thread * groups // threads, (thread + 1) * groups // threads):
                for part in range(parts):
                    start = first + part * (last - first) // parts
                    stop = first + (part + 1) * (last - first) // parts
                    multiply_group(
                        stop - start,
                        rows.ctypes.data + 2 * start * size,
                        2 * size,
                        weight.ctypes.data + 2 * g * GROUP * size,
                        size // 2,
                        bias.ctypes.data + 4 * g * GROUP,
                        out.ctypes.data + 2 * (start * outputs + g * GROUP),
                        2 * outputs,
                    )


@compiled()
def attend_and_gate(
    rows, norm, qkv, cos, sin, starts, slots, keys, values, mask, scale, output, second, gate_up,
    total, gates, threads,
):  # fmt: skip
    """Compute a decoder layer up to its activation: `total` = rows + attention(norm(rows)) [n, H].

    All tensors are bits.

    Args:
        rows: [n, H], of the tokens of all rows of a batch.
        norm, second: Weight [H] and epsilon of the norms before attention and before the MLP.
        qkv, output, gate_up: Weights and biases of products (`product`).
        cos, sin, starts, slots, keys, values, mask, scale: See `loops.rotated_attention`.
        gates: [n, 2 I], gate and up of the MLP.
        threads: How many compute.
    """
    count, size = len(rows), cos.shape[2]
    normed, added = np.empty_like(rows), np.empty_like(rows)
    rms_norm(rows, norm[0], norm[1], normed)
    states = np.empty((count, len(qkv[1])), np.uint16)
    product(normed, qkv[0], qkv[1], states, threads)
    heads = len(qkv[1]) // size
    found = np.empty((count, heads - 2 * keys.shape[1], size), np.uint16)
    given = cos, sin, starts, slots, keys, values, mask, scale, found
    rotated_attention(states.reshape(count, heads, size), *given)
    product(found.reshape(count, -1), output[0], output[1], added, threads)
    add_and_norm(rows, added, second[0], second[1], total, normed)
    product(normed, gate_up[0], gate_up[1], gates, threads)


@compiled()
def add_product(rows, weight, bias, total, threads):
    """Add a product to `total` [n, O]; see `product`."""
    added = np.empty_like(total)
    product(rows, weight, bias, added, threads)
    for r in range(total.shape[0]):
        for o in range(total.shape[1]):
            total[r, o] = rounded(number(total[r, o]) + number(added[r, o]))
