"""CPU loops for few rows in bfloat16, of the CPU's vectors, which numba compiles.

A pass of decoding reads all weights for a few rows. oneDNN's products take the memory's time, then
that of the arithmetic. Here the next weights come while these are multiplied, so up to `MOST` rows
take hardly longer than one (docs/lab_notes/small.md). A row's sums run in the order of its inputs:
its bits do not depend on the rows beside it. A CPU without products of pairs of bfloat16 numbers
(AVX2, most AVX-512) multiplies the same numbers in float32.

numba lacks the type, and keeps no sums in registers. So `multiply`, `score`, `exponentiate`,
`add_values` and `turn` are written for LLVM.
"""

from collections.abc import Callable
from math import factorial, log

import numpy as np

try:  # transformers refuses to copy a file whose needs are missing and not in a `try`
    import numba
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.core.codegen import get_host_cpu_features
    from numba.extending import intrinsic
except ImportError:
    raise

# numba keeps what it compiled of this file until this file changes, whatever `models.loops` does.
from models.loops import (
    ANY_ORDER,
    LOG2_E,
    add_and_norm,
    compiled,
    gate,
    number,
    placed,
    readable,
    rms_norm,
    unread,
)
from models.loops import bits as rounded


def _features() -> set[str]:
    """Return the sets of instructions that numba compiles for."""
    known = getattr(numba.config, "CPU_FEATURES", None)  # of another CPU, if someone says so
    known = get_host_cpu_features() if known is None else known
    return {name[1:] for name in known.split(",") if name[:1] == "+"}


FEATURES = _features()
IN_PAIRS = "avx512bf16" in FEATURES  # two products of bfloat16 numbers are one instruction
LANES = 16 if "avx512f" in FEATURES else 8  # sums of a register
GROUP = 2 * LANES  # outputs that are computed together: two registers of a row
# Rows whose sums fit into the registers (32; AVX2 has 16), with weights and a number of a row.
MOST = 14 if IN_PAIRS else 12 if LANES == 16 else 5
CHUNK = 252 // MOST * MOST  # rows that stay in a core's cache while all weights pass
AHEAD = 2048  # bytes between the weights that are multiplied and those that are fetched
_REGISTER, _LINE = 4 * LANES, 64  # bytes of a register, and of what memory gives at once
_FAR = [n for n in (1, 2, 4, 8) if n < LANES]
NOTHING = -127.0  # 2 to this power is 0, as its exponent's bits are
POWERS = [log(2) ** n / factorial(n) for n in range(5, -1, -1)]  # of 2^x, to 2e-6 up to 1 / 2
UNITS = 2.0**30  # in which weights are added up, as integers


class BFloat16(ir.types.Type):
    """The type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_WORD, _ADDRESS, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)
_PAIRS, _ROUNDED = ir.VectorType(BFloat16(), 2 * LANES), ir.VectorType(BFloat16(), LANES)
_BITS, _LONGS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(_ADDRESS, LANES)


def runs() -> bool:
    """Return whether this CPU has such vectors, and nothing better (AMX, left to oneDNN)."""
    return {"avx2", "fma"} <= FEATURES and "amx-bf16" not in FEATURES


@intrinsic
def multiply(typing, count, rows, row_size, weight, pairs, later, pace, bias, out, out_size):
    """Compute sum_k rows[r, k] weight[o, k] + bias[o], of 1 to MOST rows and a group's outputs o.

    All are addresses, and sizes in bytes.

    Args:
        count: Rows.
        rows, row_size: The first row, as `prepared`, and how far the next one is.
        weight, pairs: Weights [pairs, GROUP, 2] in bfloat16: each output's for two inputs.
        later, pace: Which weights to fetch meanwhile, and how far on for each pair.
        bias: [GROUP] in float32.
        out, out_size: The first row's outputs, in bfloat16, and how far the next one's are.
    """

    def write(builder, count, rows, row_size, weight, pairs, later, pace, bias, out, out_size):
        sums = _products(builder, count, rows, row_size, weight, pairs, (later, pace))
        biases = [_read(builder, bias, _REGISTER * i, _SUMS) for i in range(2)]
        for r, row in enumerate(_rows(sums)):
            line = builder.add(out, builder.mul(out_size, _ADDRESS(r)))
            for i, (s, b) in enumerate(zip(row, biases)):
                found = _rounded(builder, builder.fadd(s, b))
                builder.store(found, _at(builder, line, 2 * LANES * i, _BITS), align=2)

    return types.void(*[types.intp] * 10), _by_count(write)


@intrinsic
def score(typing, count, rows, row_size, keys, pairs, out, out_size):
    """Compute sum_k rows[r, k] keys[o, k] in float32; see `multiply`."""

    def write(builder, count, rows, row_size, keys, pairs, out, out_size):
        sums = _products(builder, count, rows, row_size, keys, pairs)
        _store(builder, sums, out, out_size)

    return types.void(*[types.intp] * 7), _by_count(write)


@intrinsic
def exponentiate(typing, scores, parts):
    """Replace scores by 2^(score - the largest), rounded to bfloat16; return the sum of all.

    A score of -inf becomes 0 and adds nothing, and the sum, of integers, has no order: so it does
    not matter where hidden keys are.

    Args:
        scores: The address of LANES times `parts` numbers in float32.
    """

    def code(context, builder, signature, given):
        scores, parts = given
        largest_of = _function(builder, f"llvm.maxnum.v{LANES}f32", _SUMS, [_SUMS] * 2)
        reduced = _function(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _FLOAT, [_SUMS])
        nearest = _function(builder, f"llvm.rint.v{LANES}f32", _SUMS, [_SUMS])
        summed = _function(builder, f"llvm.vector.reduce.add.v{LANES}i64", _ADDRESS, [_LONGS])
        add_product = _add_product(builder)

        def at(part):
            return builder.add(scores, builder.mul(part, _ADDRESS(_REGISTER)))

        def largest(part, found):
            return [builder.call(largest_of, [found[0], _read(builder, at(part), 0, _SUMS)])]

        (most,) = _loop(builder, parts, [_all(-np.inf)], largest)
        most = builder.call(reduced, [most])
        none = builder.fcmp_ordered("==", most, _FLOAT(-np.inf))
        most = _lanes(builder, builder.select(none, _FLOAT(0.0), most))

        def step(part, total):
            x = builder.fsub(_read(builder, at(part), 0, _SUMS), most)
            x = builder.call(largest_of, [x, _all(NOTHING)])
            whole = builder.call(nearest, [x])
            rest, y = builder.fsub(x, whole), _all(POWERS[0])
            for c in POWERS[1:]:
                y = builder.call(add_product, [y, rest, _all(c)])
            power = builder.add(builder.fptosi(whole, _WORDS), _WORDS([127] * LANES))
            power = builder.bitcast(builder.shl(power, _WORDS([23] * LANES)), _SUMS)
            y = builder.fmul(y, power)
            found = _number(builder, _rounded(builder, y))
            builder.store(found, _at(builder, at(part), 0, _SUMS), align=4)
            units = builder.fptosi(builder.fmul(y, _all(UNITS)), _WORDS)
            return [builder.add(total[0], builder.sext(units, _LONGS))]

        (total,) = _loop(builder, parts, [_LONGS([0] * LANES)], step)
        total = builder.sitofp(builder.call(summed, [total]), _FLOAT)
        return builder.fdiv(total, _FLOAT(UNITS))

    return types.float32(*[types.intp] * 2), code


@intrinsic
def add_values(typing, count, weights, row_size, values, value_size, keys, out, out_size):
    """Compute sum_k weights[r, k] values[k, d], key by key, of 1 to MOST rows and GROUP numbers d.

    All are addresses, and sizes in bytes.

    Args:
        count: Rows.
        weights, row_size: The first row's, in float32, and how far the next one's are.
        values, value_size: The first key's, in bfloat16, and how far the next one's are.
        keys: How many.
        out, out_size: The first row's sums, in float32, and how far the next one's are.
    """

    def write(builder, count, weights, row_size, values, value_size, keys, out, out_size):
        add_product = _add_product(builder)

        def step(key, sums):
            line = builder.add(values, builder.mul(key, value_size))
            found = [_number(builder, _read(builder, line, 2 * LANES * i, _BITS)) for i in range(2)]
            first = builder.add(weights, builder.mul(key, _ADDRESS(4)))
            for r, row in enumerate(_rows(sums)):
                weight = _spread(builder, builder.add(first, builder.mul(row_size, _ADDRESS(r))))
                weight = builder.bitcast(weight, _SUMS)
                yield from (builder.call(add_product, [weight, v, s]) for v, s in zip(found, row))

        sums = _loop(builder, keys, [_all(0.0)] * (2 * count), step)
        _store(builder, sums, out, out_size)

    return types.void(*[types.intp] * 8), _by_count(write)


@intrinsic
def turn(typing, keys, key_size, turned):
    """Write the words [GROUP, LANES] of a group of keys as [LANES, GROUP].

    All are addresses, and `key_size` is how far the next key is, in bytes.
    """

    def code(context, builder, signature, given):
        keys, key_size, turned = given
        for half in range(2):
            lines = []
            for k in range(LANES):
                far = builder.mul(key_size, _ADDRESS(half * LANES + k))
                lines.append(_read(builder, builder.add(keys, far), 0, _WORDS))
            for far in _FAR:  # squares of so many words beside the diagonal change places
                upper = _WORDS([LANES + i - far if i & far else i for i in range(LANES)])
                lower = _WORDS([LANES + i if i & far else i + far for i in range(LANES)])
                for i in range(LANES):
                    if not i & far:
                        both = lines[i], lines[i + far]
                        lines[i] = builder.shuffle_vector(*both, upper)
                        lines[i + far] = builder.shuffle_vector(*both, lower)
            for pair, line in enumerate(lines):
                there = _at(builder, turned, _REGISTER * (2 * pair + half), _WORDS)
                builder.store(line, there, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), code


def _by_count(write: Callable) -> Callable:
    """Return what writes the code of each number of rows, whose sums are all in registers."""

    def code(context, builder, signature, given):
        end = builder.append_basic_block("end")
        cases = builder.switch(given[0], end)
        for count in range(1, MOST + 1):
            block = builder.append_basic_block(f"rows_{count}")
            cases.add_case(_ADDRESS(count), block)
            builder.position_at_end(block)
            write(builder, count, *given[1:])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return code


def _products(builder, count, rows, row_size, weight, pairs, fetched=None):
    """Write the sums of rows times a group's weights; others are fetched (`multiply`)."""
    hints = [cgutils.voidptr_t, _WORD, _WORD, _WORD]
    fetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), hints)
    add, size = (_add_pairs(builder), 4) if IN_PAIRS else (_add_product(builder), 8)

    def step(pair, sums):
        here, weights = builder.add(weight, builder.mul(pair, _ADDRESS(2 * _REGISTER))), []
        for i in range(2):
            weights.append(_read(builder, here, _REGISTER * i, _WORDS))
            if fetched is not None and _REGISTER * i % _LINE == 0:  # to read, into all caches, data
                line = builder.add(fetched[0], builder.mul(pair, fetched[1]))
                line = _at(builder, line, _REGISTER * i, ir.IntType(8))
                builder.call(fetch, [line, _WORD(0), _WORD(3), _WORD(1)])
        first = builder.add(rows, builder.mul(pair, _ADDRESS(size)))
        lines = [builder.add(first, builder.mul(row_size, _ADDRESS(r))) for r in range(count)]
        kind = _PAIRS if IN_PAIRS else _SUMS
        for n, bits in enumerate([weights] if IN_PAIRS else _halves(builder, weights)):
            both, found = [builder.bitcast(w, kind) for w in bits], []
            for line, row in zip(lines, _rows(sums)):
                of = builder.bitcast(_spread(builder, builder.add(line, _ADDRESS(4 * n))), kind)
                for s, w in zip(row, both):
                    found.append(builder.call(add, [s, of, w] if IN_PAIRS else [of, w, s]))
            sums = found
        return sums

    return _loop(builder, pairs, [_all(0.0)] * (2 * count), step)


def _halves(builder, weights):
    """Return the bits of the first numbers of pairs as float32, and of the second ones."""
    half, mask = _WORDS([16] * LANES), _WORDS([0xFFFF0000] * LANES)
    return [builder.shl(w, half) for w in weights], [builder.and_(w, mask) for w in weights]


def _add_pairs(builder):
    """Return the instruction: sums + the products of two pairs of numbers in each lane."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return _function(builder, name, _SUMS, [_SUMS, _PAIRS, _PAIRS])


def _rows(sums):
    """Return the two registers of each row."""
    return list(zip(sums[::2], sums[1::2]))


def _loop(builder, steps, sums, step):
    """Write steps from some sums (registers), `step(number, sums)`; return the last ones."""
    before, loop = builder.block, builder.append_basic_block("step")
    after = builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    number = builder.phi(_ADDRESS)
    first, sums = sums, [builder.phi(start.type) for start in sums]
    found = [*step(number, sums)]
    following = builder.add(number, _ADDRESS(1))
    number.add_incoming(_ADDRESS(0), before)
    number.add_incoming(following, loop)
    for s, start, new in zip(sums, first, found):
        s.add_incoming(start, before)
        s.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    return found


def _store(builder, sums, out, out_size):
    """Write sums in float32."""
    for r, row in enumerate(_rows(sums)):
        line = builder.add(out, builder.mul(out_size, _ADDRESS(r)))
        for i, s in enumerate(row):
            builder.store(s, _at(builder, line, _REGISTER * i, _SUMS), align=4)


def _add_product(builder):
    """Return the instruction: a product of float32 numbers in each lane, added to another."""
    return _function(builder, f"llvm.fma.v{LANES}f32", _SUMS, [_SUMS] * 3)


def _rounded(builder, numbers):
    """Return the bits of a register's numbers, each rounded to a bfloat16, ties to even."""
    if IN_PAIRS:
        return builder.bitcast(builder.fptrunc(numbers, _ROUNDED), _BITS)
    words, half = builder.bitcast(numbers, _WORDS), _WORDS([16] * LANES)
    odd = builder.and_(builder.lshr(words, half), _WORDS([1] * LANES))
    words = builder.add(builder.add(words, _WORDS([0x7FFF] * LANES)), odd)
    return builder.trunc(builder.lshr(words, half), _BITS)


def _number(builder, bits):
    """Return a register of the numbers that the bits of bfloat16 encode."""
    words = builder.zext(bits, _WORDS)
    return builder.bitcast(builder.shl(words, _WORDS([16] * LANES)), _SUMS)


def _all(number):
    """Return a register of one number."""
    return _SUMS([number] * LANES)


def _lanes(builder, number):
    """Return a register with a number that is computed in all of its lanes."""
    first = builder.insert_element(_SUMS(ir.Undefined), number, _WORD(0))
    return builder.shuffle_vector(first, _SUMS(ir.Undefined), _WORDS([0] * LANES))


def _function(builder, name, result, given):
    kind = ir.FunctionType(result, given)
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _at(builder, address, offset, kind):
    return builder.inttoptr(builder.add(address, _ADDRESS(offset)), kind.as_pointer())


def _read(builder, address, offset, kind):
    return builder.load(_at(builder, address, offset, kind), align=2)  # it may be anywhere


def _spread(builder, address):
    """Return a register with the word at an address in all of its lanes."""
    one = _read(builder, address, 0, _WORD)
    first = builder.insert_element(_WORDS(ir.Undefined), one, _WORD(0))
    return builder.shuffle_vector(first, _WORDS(ir.Undefined), _WORDS([0] * LANES))


if IN_PAIRS:  # products read bits

    @compiled()
    def prepared(rows):
        """Return rows as products read them."""
        return rows

else:  # products read float32

    @compiled()
    def prepared(rows):
        """Return rows as products read them."""
        count, size = rows.shape
        found = np.empty((count, size), np.float32)
        for r in range(count):
            for d in range(size):
                found[r, d] = number(rows[r, d])
        return found


@compiled(parallel=True)
def product(rows, weight, bias, out, threads):
    """Compute rows [n, D] times weights, plus a bias in float32 [O], into `out` [n, O].

    Args:
        rows, out: Bits of bfloat16 numbers. O is a multiple of GROUP, D is even.
        weight: The address of bits [O / GROUP, D / 2, GROUP, 2].
        bias: [O].
        threads: How many compute.
    """
    (count, size), outputs, groups = rows.shape, out.shape[1], out.shape[1] // GROUP
    group, read = 2 * GROUP * size, prepared(rows)
    for thread in numba.prange(threads):
        for first in range(0, count, CHUNK):
            last = min(count, first + CHUNK)
            parts = (last - first + MOST - 1) // MOST
            for g in range(thread * groups // threads, (thread + 1) * groups // threads):
                here = weight + g * group
                for part in range(parts):
                    start = first + part * (last - first) // parts
                    stop = first + (part + 1) * (last - first) // parts
                    later, pace = here + AHEAD, 2 * _REGISTER
                    if parts > 1:
                        later, pace = here + group + part * group // parts, 2 * _REGISTER // parts
                    multiply(
                        stop - start,
                        read.ctypes.data + read.itemsize * start * size,
                        read.itemsize * size,
                        here,
                        size // 2,
                        later,
                        pace,
                        bias.ctypes.data + 4 * g * GROUP,
                        out.ctypes.data + 2 * (start * outputs + g * GROUP),
                        2 * outputs,
                    )


@compiled()
def weigh(query, keys, weights):
    """Write a few queries' scores [n, K] of `keys` [K, D / 2], as words, to `weights`."""
    pairs, read = keys.shape[1], prepared(query)
    turned, rest = np.empty((pairs, GROUP), np.uint32), np.zeros((GROUP, pairs), np.uint32)
    for first in range(0, len(keys), GROUP):
        here = keys[first : first + GROUP]
        if len(here) < GROUP:
            rest[: len(here)] = here
            here = rest
        for pair in range(0, pairs, LANES):
            turn(here.ctypes.data + 4 * pair, 4 * pairs, turned[pair:].ctypes.data)
        score(
            len(read),
            read.ctypes.data,
            read.itemsize * 2 * pairs,
            turned.ctypes.data,
            pairs,
            weights.ctypes.data + 4 * first,
            4 * weights.shape[1],
        )


@compiled(fastmath=ANY_ORDER)
def scale_and_mask(scores, hidden, keys, scale):
    """Scale a query's scores, add its mask, and turn both to powers of 2; those after are -inf."""
    for k in range(keys):
        scores[k] = (scores[k] * np.float32(scale) + number(hidden[k])) * LOG2_E
    scores[keys:] = -np.inf


@compiled(parallel=True)
def attention(query, starts, keys, values, lines, mask, scale, out):
    """Compute `loops.attention`, whose arguments these are, of heads of a multiple of GROUP.

    A part of a head's queries reads the keys from the first to the last that any of them may.
    """
    rows, (_, asked, size) = len(starts) - 1, query.shape
    group, words = asked // lines[0], keys.view(np.uint32)
    parts = np.zeros(rows + 1, np.int64)
    for b in range(rows):
        tokens = starts[b + 1] - starts[b]
        parts[b + 1] = parts[b] + lines[0] * ((tokens * group + MOST - 1) // MOST)
    for i in numba.prange(parts[rows]):
        b = np.searchsorted(parts, i, side="right") - 1
        start, queries, of = starts[b], (starts[b + 1] - starts[b]) * group, parts[b + 1] - parts[b]
        of //= lines[0]  # parts of the queries of a head of keys
        h, part, tokens = (i - parts[b]) // of, (i - parts[b]) % of, queries // group
        first, last = part * queries // of, (part + 1) * queries // of
        count, end = last - first, 0
        for n in range(count):
            token = start + (first + n) % tokens
            end = readable(mask[token : token + 1], end)
        begin = end
        for n in range(count):
            begin = unread(mask[start + (first + n) % tokens], begin)
        read = end - begin
        room = (read + GROUP - 1) // GROUP * GROUP
        some, found = np.empty((count, size), np.uint16), np.zeros((count, size), np.float32)
        weights, totals = np.empty((count, room), np.float32), np.empty(count, np.float32)
        for n in range(count):
            head, token = h * group + (first + n) // tokens, start + (first + n) % tokens
            some[n] = query[token, head]
        key, value = b * lines[1] + h * lines[2] + begin, b * lines[3] + h * lines[4] + begin
        weigh(some, words[key : key + read], weights)
        for n in range(count):
            scale_and_mask(weights[n], mask[start + (first + n) % tokens, begin:], read, scale)
            totals[n] = exponentiate(weights[n].ctypes.data, room // LANES)
        for d in range(0, size if read else 0, GROUP):
            add_values(
                count,
                weights.ctypes.data,
                4 * room,
                values.ctypes.data + 2 * (value * size + d),
                2 * size,
                read,
                found.ctypes.data + 4 * d,
                4 * size,
            )
        for n in range(count):
            head, token = h * group + (first + n) // tokens, start + (first + n) % tokens
            total = totals[n] if totals[n] > 0 else np.float32(1)
            for d in range(size):
                out[token, head, d] = rounded(found[n, d] / total)


@compiled()
def rotated_attention(states, cos, sin, starts, slots, keys, values, mask, scale, out):
    """Compute `loops.rotated_attention`, whose arguments these are."""
    attention(*placed(states, cos, sin, starts, slots, keys, values), mask, scale, out)


@compiled()
def layers(
    rows, norm, qkv, head_norms, cos, sin, starts, slots, keys, values, mask, scale, output, second,
    gate_up, activation, down, out, threads,
):  # fmt: skip
    """Compute L decoder layers of Llama's form, each on the one before, into `out` [L, n, H].

    All tensors are bits.

    Args:
        rows: [n, H], of the tokens of all rows of a batch.
        norm, second: Weights [L, H] and epsilon of the norms before attention and before the MLP.
        qkv, output, gate_up, down: Weights (addresses [L]) and biases [L, O] of products
            (`product`).
        head_norms: Of queries and of keys, as `norm`; weights without numbers: none.
        keys, values: A cache's [L, B or more, heads, slots, D].
        cos, sin, starts, slots, mask, scale: See `rotated_attention`.
        activation: See `loops.gate`.
        threads: How many compute.
    """
    count, size, held = len(rows), cos.shape[2], keys.shape[2]
    asked = qkv[1].shape[1] // size - 2 * held
    normed, added = np.empty_like(rows), np.empty_like(rows)
    states = np.empty((count, qkv[1].shape[1]), np.uint16)
    heads, found = states.reshape(-1, size), np.empty((count, asked, size), np.uint16)
    gates = np.empty((count, gate_up[1].shape[1]), np.uint16)
    active = np.empty((count, gate_up[1].shape[1] // 2), np.uint16)
    for i in range(len(out)):
        after = out[i]
        rms_norm(rows, norm[0][i], norm[1], normed)
        product(normed, qkv[0][i], qkv[1][i], states, threads)
        for start in range(0, len(heads), asked + 2 * held):
            first, last = heads[start : start + asked], heads[start + asked : start + asked + held]
            for part, (weights, epsilon) in zip((first, last), head_norms):
                if weights.shape[1]:
                    rms_norm(part, weights[i], epsilon, part)
        memory, all_heads = (keys[i], values[i]), heads.reshape(count, -1, size)
        rotated_attention(all_heads, cos, sin, starts, slots, *memory, mask, scale, found)
        product(found.reshape(count, -1), output[0][i], output[1][i], added, threads)
        add_and_norm(rows, added, second[0][i], second[1], after, normed)
        product(normed, gate_up[0][i], gate_up[1][i], gates, threads)
        gate(gates, activation, active)
        product(active, down[0][i], down[1][i], added, threads)
        for r in range(count):
            for d in range(rows.shape[1]):
                after[r, d] = rounded(number(after[r, d]) + number(added[r, d]))
        rows = after


@compiled()
def norms_in_turn(parts, weights, epsilon, out):
    """Write the `rms_norm` of rows [n, H] to `out`, with each of the weights [L, H] in turn."""
    for i in range(len(parts)):
        rms_norm(parts[i : i + 1], weights[i % len(weights)], epsilon, out[i : i + 1])


@compiled()
def combine(states, weights, epsilon, fc, out, threads):
    """Compute fc(norms of states) into `out` [n, H] (`models.redrafter.Redrafter.combined`).

    Args:
        states: Bits [n, L, H].
        weights, epsilon: Those of L norms, [L, H].
        fc: Weight (address) and bias of a product.
        threads: How many compute.
    """
    normed, hidden = np.empty_like(states), states.shape[2]
    norms_in_turn(states.reshape(-1, hidden), weights, epsilon, normed.reshape(-1, hidden))
    product(normed.reshape(len(states), -1), fc[0], fc[1], out, threads)


@compiled()
def run(embedded, state, weights, epsilon, gate_up, activation, down, head, logits, out, threads):
    """Compute a run of `models.redrafter.Redrafter`: logits [n, V] and the states after it.

    Args:
        embedded, state: Bits [n, H].
        weights, epsilon: Those of the norms of a state, an embedding and the last state, [3, H].
        gate_up, down, head: Weights (addresses) and biases of products.
        activation: See `loops.gate`.
        out: Of the states, [n, H].
        threads: How many compute.
    """
    count, hidden = state.shape
    read, normed = np.empty((2 * count, hidden), np.uint16), np.empty_like(state)
    for r in range(count):
        read[2 * r], read[2 * r + 1] = state[r], embedded[r]
    norms_in_turn(read, weights[:2], epsilon, read)
    gates = np.empty((count, len(gate_up[1])), np.uint16)
    product(read.reshape(count, -1), gate_up[0], gate_up[1], gates, threads)
    active = np.empty((count, len(gate_up[1]) // 2), np.uint16)
    gate(gates, activation, active)
    product(active, down[0], down[1], normed, threads)
    add_and_norm(state, normed, weights[2], epsilon, out, normed)
    product(normed, head[0], head[1], logits, threads)
