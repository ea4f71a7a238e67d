"""CPU loops that numba compiles at their first call and keeps on disk.

bfloat16 tensors are passed as bits, since numba lacks the type.
"""

import numpy as np

try:
    import numba
except ImportError:
    numba = None  # type: ignore[assignment]  # a module elsewhere

f32, u16, u32 = np.float32, np.uint16, np.uint32
ANY_ORDER = {"reassoc", "contract", "nsz", "nnan"}  # of a sum, but the same one each time
IN_ORDER = {"contract"}
LOG2_E, LOG_2, LOG_2_REST = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
ONE, HALF, FIXED = f32(1), f32(0.5), f32(2**32)


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


@compiled()
def readable(mask):
    """Return how many keys to read: up to the last one that any query may attend to."""
    end = 0
    for q in range(mask.shape[0]):
        for k in range(mask.shape[1] - 1, end - 1, -1):
            if number(mask[q, k]) > -np.inf:
                end = k + 1
                break
    return end


@compiled(fastmath=ANY_ORDER)
def weigh(query, keys, mask, first, scale, weights, totals):
    """Write weights [queries, keys], exp(score - the largest), and their sums, `totals`.

    The queries are number `first` and those after it: their masks come in turn.
    """
    scale = f32(scale)
    for k in range(keys.shape[0]):
        key = keys[k]
        for four in range(query.shape[0] // 4):
            q = 4 * four
            q0, q1, q2, q3 = query[q], query[q + 1], query[q + 2], query[q + 3]
            s0 = s1 = s2 = s3 = f32(0)
            for d in range(query.shape[1]):
                x = number(key[d])
                s0 += q0[d] * x
                s1 += q1[d] * x
                s2 += q2[d] * x
                s3 += q3[d] * x
            weights[q, k], weights[q + 1, k] = s0, s1
            weights[q + 2, k], weights[q + 3, k] = s2, s3
    for q in range(totals.shape[0]):
        hidden, row, largest = mask[(first + q) % mask.shape[0]], weights[q], f32(-np.inf)
        for k in range(keys.shape[0]):
            row[k] = row[k] * scale + number(hidden[k])
            largest = max(largest, row[k])
        total = np.int64(0)  # of integers, so that the order does not matter
        if largest > -np.inf:
            for k in range(keys.shape[0]):
                weight = exp(row[k] - largest)
                row[k] = number(bits(weight))
                total += np.int64(weight * FIXED)
        else:
            row[:] = f32(0)
        totals[q] = f32(total) / FIXED


@compiled(fastmath=IN_ORDER)
def add(weights, values, out):
    """Add weights times values, key by key, to `out` [queries, D], which begins at 0."""
    keys = values.shape[0]
    for four in range(keys // 4):
        k = 4 * four
        v0, v1, v2, v3 = values[k], values[k + 1], values[k + 2], values[k + 3]
        for q in range(out.shape[0]):
            w0, w1, w2, w3 = weights[q, k : k + 4]
            row = out[q]
            for d in range(out.shape[1]):
                x = row[d] + w0 * number(v0[d]) + w1 * number(v1[d])
                row[d] = x + w2 * number(v2[d]) + w3 * number(v3[d])
    for k in range(keys // 4 * 4, keys):
        value = values[k]
        for q in range(out.shape[0]):
            weight, row = weights[q, k], out[q]
            for d in range(out.shape[1]):
                row[d] += weight * number(value[d])


@compiled()
def four_queries(query, keys, values, mask, first, scale, found):
    """Compute attention of up to four queries [4, D], number `first` and on, into `found` [n, D].

    `query` is of zeros where there are fewer; `keys` and `values` [K, D] are bits, as the mask.
    """
    weights, totals = np.empty((4, len(keys)), f32), np.empty(len(found), f32)
    weigh(query, keys, mask, first, scale, weights, totals)
    add(weights, values, found)
    for q in range(len(found)):
        total = totals[q] if totals[q] > 0 else ONE
        for d in range(found.shape[1]):
            found[q, d] /= total


@compiled(parallel=True)
def attention(query, keys, values, lines, mask, scale, out):
    """Compute attention of every row and head into `out` [B, heads, queries, D].

    All arguments but `scale` are bits: query [B, heads, queries, D]; keys and values [n, D], of all
    rows and heads; lines, the numbers of lines to the next row and head of keys, then of values;
    mask [B, Q, K], added to the scores of every Q-th query.
    """
    batch, heads, queries, size = query.shape
    fours = (queries + 3) // 4
    for i in numba.prange(batch * heads * fours):  # four at a time, so that threads share a head
        b, h, first = i // (heads * fours), i // fours % heads, i % fours * 4
        count, end = min(4, queries - first), readable(mask[b])
        asked, found = np.zeros((4, size), f32), np.zeros((count, size), f32)
        for q in range(count):
            for d in range(size):
                asked[q, d] = number(query[b, h, first + q, d])
        key, value = b * lines[0] + h * lines[1], b * lines[2] + h * lines[3]
        own, theirs = keys[key : key + end], values[value : value + end]
        four_queries(asked, own, theirs, mask[b], first, scale, found)
        for q in range(count):
            for d in range(size):
                out[b, h, first + q, d] = bits(found[q, d])


@compiled(parallel=True)
def rotated_attention(states, cos, sin, slots, keys, values, mask, scale, out):
    """Rotate queries and keys, keep keys and values, and compute attention into `out`.

    All arguments but `scale` and `slots` are bits.

    Args:
        states: Queries, keys and values [B Q, asked + 2 heads, D] of the tokens.
        cos, sin: Their angles [B, Q, D] (`rotate`).
        slots: Where keys and values go [B, Q].
        keys, values: A cache's [rows, heads, slots, D].
        mask: [B, Q, K], added to the scores of the first K slots.
        out: [B Q, asked, D].
    """
    (batch, queries, size), heads, asked = cos.shape, keys.shape[1], out.shape[1]
    turned, own = np.empty((batch, asked, queries, size), u16), np.empty((1, heads, 1, size), u16)
    for b in range(batch):
        mine = slice(b * queries, (b + 1) * queries)
        rotate(states[mine], 0, cos[b : b + 1], sin[b : b + 1], turned[b : b + 1])
        for q in range(queries):
            row, slot = b * queries + q, slots[b, q]
            angles = cos[b : b + 1, q : q + 1], sin[b : b + 1, q : q + 1]
            rotate(states[row : row + 1], asked, *angles, own)
            for h in range(heads):
                keys[b, h, slot] = own[0, h, 0]
                values[b, h, slot] = states[row, asked + heads + h]
    shared = asked // heads * queries  # queries that read the same keys
    fours = (shared + 3) // 4
    for i in numba.prange(batch * heads * fours):
        b, h, first = i // (heads * fours), i // fours % heads, i % fours * 4
        count, end, head = min(4, shared - first), readable(mask[b]), h * (asked // heads)
        query, found = np.zeros((4, size), f32), np.zeros((count, size), f32)
        for n in range(count):
            group, q = (first + n) // queries, (first + n) % queries
            for d in range(size):
                query[n, d] = number(turned[b, head + group, q, d])
        own, theirs = keys[b, h, :end], values[b, h, :end]
        four_queries(query, own, theirs, mask[b], first, scale, found)
        for n in range(count):
            group, q = (first + n) // queries, (first + n) % queries
            for d in range(size):
                out[b * queries + q, head + group, d] = bits(found[n, d])


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
