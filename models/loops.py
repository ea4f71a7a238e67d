"""CPU loops that numba compiles at their first call and keeps on disk.

bfloat16 tensors are passed as bits, since numba lacks the type.
"""

import numpy as np

try:
    import numba
except ImportError:
    numba = None  # type: ignore[assignment]  # a module elsewhere

f32, u16, u32, u64 = np.float32, np.uint16, np.uint32, np.uint64
ANY_ORDER = {"reassoc", "contract", "nsz", "nnan"}  # of a sum, but the same one each time
IN_ORDER = {"contract"}
LOG2_E, LOG_2, LOG_2_REST = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
i32, LARGEST, LEAST = np.int32, np.int32(2**31 - 1), np.int32(-(2**31))
ONE, HALF, FIXED = f32(1), f32(0.5), f32(2**32)
SQRT_HALF = u32(0x3F3504F3)  # its bits
STRIDE, MIX = u64(0x9E3779B97F4A7C15), (u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB))
UNIT, BELOW_ONE = f32(2.0**-53), f32(1 - 2**-24)
PART = 8192  # numbers of noise that a thread makes at once
PIECE = 1024  # scores whose largest is found before its place is


def compiled(**options):
    """Return numba's compiler as a decorator, cached if it can be; a no-op without numba."""

    def decorate(function):
        if numba is None:
            return function
        try:
            return numba.njit(cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # it finds no folder that can be written to
            return numba.njit(error_model="numpy", **options)(function)

    return decorate


@compiled(inline="always")
def number(its_bits):
    """Return the number that a bfloat16's bits encode."""
    return u32(u32(its_bits) << u32(16)).view(f32)


@compiled(inline="always")
def bits(x):
    """Return the bits of a float32 rounded to a bfloat16, ties to even."""
    whole = f32(x).view(u32)
    odd = u32(whole >> u32(16)) & u32(1)
    return u16(u32(whole + u32(0x7FFF) + odd) >> u32(16))


@compiled(inline="always")
def exp(x):
    """Return e^x for x <= 0, to 1e-7, vectorized: numpy's runs one number at a time."""
    whole = np.floor(x * LOG2_E + HALF)
    r = x - whole * LOG_2 - whole * LOG_2_REST
    y = f32(1.9875691500e-4)
    y = y * r + f32(1.3981999507e-3)
    y = y * r + f32(8.3334519073e-3)
    y = y * r + f32(4.1665795894e-2)
    y = y * r + f32(1.6666665459e-1)
    y = y * r + HALF
    y = y * r * r + r + ONE
    power = u32(u32(np.int32(max(whole, f32(-126))) + np.int32(127)) << u32(23)).view(f32)
    return y * power if x > f32(-87) else f32(0)


@compiled(inline="always")
def log(x):
    """Return ln x of a normal x > 0, to 1e-7, vectorized, in the order that is written."""
    whole = np.int32(f32(x).view(u32) - SQRT_HALF) >> np.int32(23)
    r = u32(f32(x).view(u32) - u32(whole << np.int32(23))).view(f32) - ONE
    y = f32(7.0376836292e-2)
    y = y * r - f32(1.1514610310e-1)
    y = y * r + f32(1.1676998740e-1)
    y = y * r - f32(1.2420140846e-1)
    y = y * r + f32(1.4249322787e-1)
    y = y * r - f32(1.6668057665e-1)
    y = y * r + f32(2.0000714765e-1)
    y = y * r - f32(2.4999993993e-1)
    y = y * r + f32(3.3333331174e-1)
    y = y * r * (r * r) + f32(whole) * LOG_2_REST - HALF * (r * r)
    return r + y + f32(whole) * LOG_2


@compiled()
def readable(mask, end=0):
    """Return how many keys to read: `end`, or up to the last one that any query may attend to."""
    for q in range(mask.shape[0]):
        for k in range(mask.shape[1] - 1, end - 1, -1):
            if number(mask[q, k]) > -np.inf:
                end = k + 1
                break
    return end


@compiled()
def unread(hidden, most):
    """Return how many keys, `most` or less, come before the first that a query may attend to."""
    for k in range(most):
        if number(hidden[k]) > -np.inf:
            return k
    return most


@compiled(fastmath=ANY_ORDER)
def exponentiate(row, hidden, scale):
    """Turn a query's scores into exp(scaled and masked score - the largest); return their sum."""
    scale, largest = f32(scale), f32(-np.inf)
    for k in range(row.shape[0]):
        row[k] = row[k] * scale + number(hidden[k])
        largest = max(largest, row[k])
    if not largest > -np.inf:
        row[:] = f32(0)
        return f32(0)
    total = np.int64(0)  # of integers, so that the order does not matter
    for k in range(row.shape[0]):
        weight = exp(row[k] - largest)
        row[k] = number(bits(weight))
        total += np.int64(weight * FIXED)
    return f32(total) / FIXED


@compiled(fastmath=ANY_ORDER)
def weigh(query, keys, mask, first, scale, weights, totals):
    """Write weights [4, keys], exp(score - the largest), and their sums, `totals` [4].

    The queries [4, D] are number `first` and those after it: their masks come in turn.
    """
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    for k in range(keys.shape[0]):
        key = keys[k]
        s0 = s1 = s2 = s3 = f32(0)
        for d in range(query.shape[1]):
            x = number(key[d])
            s0 += q0[d] * x
            s1 += q1[d] * x
            s2 += q2[d] * x
            s3 += q3[d] * x
        weights[0, k], weights[1, k], weights[2, k], weights[3, k] = s0, s1, s2, s3
    for q in range(totals.shape[0]):
        totals[q] = exponentiate(weights[q], mask[(first + q) % mask.shape[0]], scale)


@compiled(fastmath=IN_ORDER)
def add(weights, values, out):
    """Add weights times values, key by key, to `out` [4, D], which begins at 0."""
    keys = values.shape[0]
    o0, o1, o2, o3 = out[0], out[1], out[2], out[3]
    for pair in range(keys // 2):  # a value is converted once for four queries
        k = 2 * pair
        v0, v1, w0, w1 = values[k], values[k + 1], weights[:, k], weights[:, k + 1]
        for d in range(out.shape[1]):
            x, y = number(v0[d]), number(v1[d])
            o0[d] = o0[d] + w0[0] * x + w1[0] * y
            o1[d] = o1[d] + w0[1] * x + w1[1] * y
            o2[d] = o2[d] + w0[2] * x + w1[2] * y
            o3[d] = o3[d] + w0[3] * x + w1[3] * y
    for k in range(keys // 2 * 2, keys):
        for q in range(4):
            weight, row, value = weights[q, k], out[q], values[k]
            for d in range(out.shape[1]):
                row[d] += weight * number(value[d])


@compiled()
def four_queries(query, keys, values, mask, first, scale, found):
    """Compute attention of four queries [4, D], number `first` and on, into `found` of zeros.

    `keys` and `values` [K, D] are bits, as the mask. Where there are fewer, queries are of zeros.
    """
    weights, totals = np.empty((4, len(keys)), f32), np.empty(4, f32)
    weigh(query, keys, mask, first, scale, weights, totals)
    add(weights, values, found)
    for q in range(4):
        total = totals[q] if totals[q] > 0 else ONE
        for d in range(found.shape[1]):
            found[q, d] /= total


@compiled(parallel=True)
def attention(query, starts, keys, values, lines, mask, scale, out):
    """Compute attention of every row's tokens and heads into `out` [n, heads, D].

    All arguments but `starts`, `lines` and `scale` are bits.

    Args:
        query: [n, heads, D], of the tokens of all rows, row after row.
        starts: [B + 1], the number of each row's first token, and n.
        keys, values: [lines, D], of all rows and heads.
        lines: How many heads of keys there are; lines to the next row and head of keys, then of
            values.
        mask: [n, K], added to a token's scores of the first K keys of its row.
    """
    rows, (_, asked, size) = len(starts) - 1, query.shape
    group = asked // lines[0]  # heads that read the same keys
    ends, parts = np.empty(rows, np.int64), np.zeros(rows + 1, np.int64)
    for b in range(rows):
        tokens = starts[b + 1] - starts[b]
        ends[b] = readable(mask[starts[b] : starts[b + 1]])
        parts[b + 1] = parts[b] + lines[0] * ((tokens * group + 3) // 4)
    for i in numba.prange(parts[rows]):  # four queries at a time, so that threads share a head
        b = np.searchsorted(parts, i, side="right") - 1
        start, tokens = starts[b], starts[b + 1] - starts[b]
        fours = (tokens * group + 3) // 4
        h, first = (i - parts[b]) // fours, (i - parts[b]) % fours * 4
        count = min(4, tokens * group - first)
        four, found = np.zeros((4, size), f32), np.zeros((4, size), f32)
        for n in range(count):
            head, token = h * group + (first + n) // tokens, start + (first + n) % tokens
            for d in range(size):
                four[n, d] = number(query[token, head, d])
        key, value = b * lines[1] + h * lines[2], b * lines[3] + h * lines[4]
        own, theirs = keys[key : key + ends[b]], values[value : value + ends[b]]
        four_queries(four, own, theirs, mask[start : start + tokens], first, scale, found)
        for n in range(count):
            head, token = h * group + (first + n) // tokens, start + (first + n) % tokens
            for d in range(size):
                out[token, head, d] = bits(found[n, d])


@compiled()
def placed(states, cos, sin, starts, slots, keys, values):
    """Rotate queries and keys, keep keys and values; return `attention`'s arguments up to `lines`.

    All arguments but `starts` and `slots` are bits.

    Args:
        states: Queries, keys and values [n, asked + 2 heads, D] of the tokens of all rows.
        cos, sin: Their angles [n, 1, D] (`rotate`).
        starts: See `attention`.
        slots: Where a token's key and value go, [n].
        keys, values: A cache's [B or more, heads, slots, D].
    """
    (tokens, _, size), (_, heads, room, _) = cos.shape, keys.shape
    asked = states.shape[1] - 2 * heads
    query, key = np.empty((tokens, asked, 1, size), u16), np.empty((tokens, heads, 1, size), u16)
    rotate(states, 0, cos, sin, query)
    rotate(states, asked, cos, sin, key)
    for b in range(len(starts) - 1):
        for n in range(starts[b], starts[b + 1]):
            for h in range(heads):
                keys[b, h, slots[n]] = key[n, h, 0]
                values[b, h, slots[n]] = states[n, asked + heads + h]
    lines = heads, heads * room, room, heads * room, room
    flat = keys.reshape(-1, size), values.reshape(-1, size)
    return query.reshape(tokens, asked, size), starts, flat[0], flat[1], lines


@compiled()
def rotated_attention(states, cos, sin, starts, slots, keys, values, mask, scale, out):
    """Compute `attention` of what is `placed` into `out` [n, asked, D]."""
    attention(*placed(states, cos, sin, starts, slots, keys, values), mask, scale, out)


@compiled(fastmath=ANY_ORDER)
def multiply(rows, weight, out):
    """Write the products of rows [n, D] in float32 with bfloat16 weights [O, D] to `out` [n, O]."""
    count, size = rows.shape
    for o in range(weight.shape[0]):
        line = weight[o]
        for four in range(count // 4):  # a weight is converted once for four rows
            r = 4 * four
            r0, r1, r2, r3 = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
            s0 = s1 = s2 = s3 = f32(0)
            for d in range(size):
                x = number(line[d])
                s0 += r0[d] * x
                s1 += r1[d] * x
                s2 += r2[d] * x
                s3 += r3[d] * x
            out[r, o], out[r + 1, o], out[r + 2, o], out[r + 3, o] = s0, s1, s2, s3
        for r in range(count // 4 * 4, count):
            row, s0 = rows[r], f32(0)
            for d in range(size):
                s0 += row[d] * number(line[d])
            out[r, o] = s0


@compiled(parallel=True)
def product(rows, weight, out, parts):
    """Compute `multiply`, its outputs in so many parts at once."""
    outputs = weight.shape[0]
    for i in numba.prange(parts):
        start, stop = i * outputs // parts, (i + 1) * outputs // parts
        multiply(rows, weight[start:stop], out[:, start:stop])


@compiled(fastmath=ANY_ORDER)
def rms_norm(rows, weight, epsilon, out):
    """Write weight * x / sqrt(mean(x^2) + epsilon) of every row [n, D] to `out`.

    It is rounded before and after the multiplication by the weight.
    """
    size = rows.shape[1]
    for r in range(rows.shape[0]):
        row, total = rows[r], f32(0)
        for d in range(size):
            x = number(row[d])
            total += x * x
        factor = ONE / np.sqrt(total / f32(size) + f32(epsilon))
        for d in range(size):
            x = number(bits(number(row[d]) * factor))
            out[r, d] = bits(x * number(weight[d]))


@compiled(fastmath=ANY_ORDER)
def add_and_norm(rows, added, weight, epsilon, total, out):
    """Write rows + added [n, D] to `total`, and their `rms_norm` to `out`."""
    for r in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            total[r, d] = bits(number(rows[r, d]) + number(added[r, d]))
    rms_norm(total, weight, epsilon, out)


@compiled(parallel=True)
def gate(gates, activation, out):
    """Write act(gate) * up to `out` [n, I], of gates [n, 2 I].

    `activation` [2^16] are the bits of act(x) for the bits of every x: its own, whatever act is.
    """
    size = out.shape[1]
    for r in numba.prange(len(out)):
        row, found = gates[r], out[r]
        for i in range(size):
            found[i] = activation[row[i]]
        for i in range(size):  # by itself, as it is vectorized
            found[i] = bits(number(found[i]) * number(row[size + i]))


@compiled(inline="always")
def turned(x, cos, y, sin):
    """Return x cos + y sin, of bits of both, rounded after each operation."""
    return bits(number(bits(x * number(cos))) + number(bits(y * number(sin))))


@compiled()
def rotate(states, first, cos, sin, out):
    """Write some heads of states, rotated by the angles of positions [B, Q, D], to `out`.

    `states` [B Q, all heads, D] are contiguous, or the loop would not be vectorized; `out` [B,
    heads, Q, D] has head `first` and those after it. Rounded after each operation, as transformers'
    rotary embedding: x cos + (-y, x) sin, with x and y a state's halves.
    """
    batch, heads, queries, size = out.shape
    half = size // 2
    for b in range(batch):
        for q in range(queries):
            c, s = cos[b, q], sin[b, q]
            for h in range(heads):
                state, found = states[b * queries + q, first + h], out[b, h, q]
                for d in range(half):
                    x, y, e = number(state[d]), number(state[half + d]), half + d
                    found[d] = turned(x, c[d], -y, s[d])
                    found[e] = turned(y, c[e], x, s[e])


@compiled(inline="always")
def order(x):
    """Return an int32 for a float32: of larger numbers larger ones, of both zeros the same."""
    its_bits = f32(x + f32(0)).view(i32)
    return i32(its_bits ^ (i32(its_bits >> i32(31)) & LARGEST))


@compiled()
def largest_sum(x, y):
    """Return the `order` of the largest x + y of two rows; of floats no maximum is vectorized."""
    largest = LEAST
    for i in range(len(x)):
        largest = max(largest, order(x[i] + y[i]))
    return largest


@compiled(parallel=True)
def choose(scores, noise, of, out):
    """Write the first index of the largest score + noise to `out` [B, n].

    Args:
        scores: [B, n, V].
        noise: [B, m, V].
        of: [B, n], whose noise each row of scores has.
    """
    count, size = scores.shape[1:]
    for i in numba.prange(len(scores) * count):
        b, r = i // count, i % count
        x, y = scores[b, r], noise[b, of[b, r]]
        best, where = LEAST, 0
        for first in range(0, size, PIECE):
            largest = largest_sum(x[first : first + PIECE], y[first : first + PIECE])
            if largest > best:
                best, where = largest, first
        while order(x[where] + y[where]) < best:
            where += 1
        out[b, r] = where


@compiled(inline="always")
def mixed(x):
    """Apply the finaliser of splitmix64."""
    x = (x ^ (x >> u64(30))) * MIX[0]
    x = (x ^ (x >> u64(27))) * MIX[1]
    return x ^ (x >> u64(31))


@compiled()
def noise(key, first, out):
    """Write Gumbel noise of tokens from number `first` on, in their order, to `out`.

    It is -ln(-ln(1 - v)), where v in (0, 1) is splitmix64 of the key and the token; see `gumbel`.
    """
    for i in range(len(out)):
        x = mixed(u64(key + u64(first + i + 1) * STRIDE)) >> u64(11) | u64(1)
        v = min(f32(np.int64(x)) * UNIT, BELOW_ONE)
        rest = ONE - v  # rounded, which the first term makes up for
        out[i] = -log((v - (ONE - rest)) / rest - log(rest))


@compiled(parallel=True)
def gumbel(keys, positions, out):
    """Write Gumbel noise [B, n, V] in float32, of keys [B] and positions [B, n] (int64), to `out`.

    It is that of `decoding.engine.randomness`, up to the rounding of its logarithms.
    """
    batch, count, size = out.shape
    parts = (size + PART - 1) // PART
    for i in numba.prange(batch * count * parts):
        row, first = i // parts, i % parts * PART
        b, n = row // count, row % count
        key = mixed(u64(keys[b]) + u64(positions[b, n]) * STRIDE)
        noise(key, first, out[b, n, first : first + PART])
