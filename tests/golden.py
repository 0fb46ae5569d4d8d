"""Every quantizer's forward and gradients, written a second time: numpy in float64, loops, nothing of qconv or torch.

Each function takes values (a row is a filter of a weight, or a sample of an input), the gradient of the quantized
values, then the learned tensors and the options. It returns the quantized values, the gradient of the values, and that
of each learned tensor, as the definitions of the papers and of their code have them.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Scalar = Callable[[float], float]
Found = tuple[Array | float, ...]

FILTERS = np.array(
    [
        [-1.2, -0.6, -0.3, -0.1, 0.05, 0.2, 0.5, 0.9],  # that of the printed golden vectors
        [-2.0, 2.0, -1.0, 1.0, 0.0, -0.0, 0.25, 0.5],  # ties: ±1, ±0, twice the largest, whole and half steps
        [-2.0, 2.0, -1.0, 1.0, 0.0, -0.0, 1.0, -1.0],  # its mean is 0 and its mean magnitude is 1, exactly
    ]
)
GRAD_FILTERS = np.array(
    [
        [0.1, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8],
        [0.9, 0.35, -0.15, 0.25, -0.45, 0.55, -0.65, 0.75],
        [-0.3, 0.85, 0.6, -0.7, 0.2, -0.1, 0.4, 0.95],
    ]
)
INPUTS = np.array(
    [
        [-1.5, -1.0, -0.4, 0.0, 0.3, 0.7, 1.0, 1.8],  # that of the printed golden vectors
        [-1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0],
    ]
)
GRAD_INPUTS = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [0.5, -1.5, 2.5, -3.5, 4.5, 5.5, -6.5, 7.5]])


def each(function: Callable[..., float], *arrays: Array) -> Array:
    """``function`` of each element."""
    return np.vectorize(function, otypes=[float])(*arrays)


def sign(v: float) -> float:
    return 1.0 if v >= 0 else -1.0


def ternary_sign(v: float) -> float:
    return float(v > 0) - float(v < 0)


def clip(v: float, low: float, high: float) -> float:
    return min(max(v, low), high)


def mean_magnitude(values: Array) -> float:
    return sum(abs(v) for v in values.flat) / values.size


def jacobian(row: Array, correction: int, eps: float = 0.0, centred: bool = True) -> tuple[Array, Array]:
    """``(v − mean) / sqrt(var + eps)``, or ``v / sqrt(var + eps)``, and the derivative of its element i by v_j."""
    n = len(row)
    mean = sum(row) / n
    r = 1 / math.sqrt(sum((v - mean) ** 2 for v in row) / (n - correction) + eps)
    shifted = [v - mean if centred else v for v in row]
    derivative = np.empty((n, n))
    for i, j in product(range(n), range(n)):
        direct = (float(i == j) - (1 / n if centred else 0)) * r
        derivative[i, j] = direct - shifted[i] * (row[j] - mean) * r**3 / (n - correction)
    return np.array([v * r for v in shifted]), derivative


def through(grad: Array, derivative: Array) -> Array:
    """``Σ_i grad_i · ∂v_i/∂w_j``."""
    n = len(grad)
    return np.array([sum(grad[i] * derivative[i, j] for i in range(n)) for j in range(n)])


# Surrogates: what stands for the derivative of the sign


def straight(v: float) -> float:
    return 1.0


def hard_clip(v: float) -> float:
    return float(abs(v) <= 1)


def approx_sign(v: float) -> float:
    return max(2 - 2 * abs(v), 0.0)


def ede(v: float, t: float, k: float) -> float:
    return k * t * (1 - math.tanh(t * v) ** 2)


def polynomial(v: float, t: float, k: float) -> float:
    return k * max(math.sqrt(2) * t - t**2 * abs(v), 0.0)


def reste_slope(v: float, o: float, m: float = 0.1, t: float = 1.5) -> float:
    if abs(v) <= m:
        return m ** (1 / o) / m
    return abs(v) ** ((1 - o) / o) / o if abs(v) <= t else 0.0


def swish_sign(v: float, b: float = 5.0) -> float:
    return b * (2 - b * v * math.tanh(b * v / 2)) / (1 + math.cosh(b * v))


# Binary


def identity(v: Array, g: Array) -> Found:
    return v, g


def bnn(v: Array, g: Array, d: Scalar) -> Found:
    return each(sign, v), each(lambda x, grad: grad * d(x), v, g)


def scaled_sign(v: Array, g: Array, gradient: str) -> Found:
    """BWN (``exact``, ``detached``, ``paper``) and Bi-Real Net (``code``; its paper's is ``detached``)."""
    v_q, dv = np.empty_like(v), np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        n, alpha = len(row), mean_magnitude(row)
        of_alpha = sum(grad[j] * sign(row[j]) for j in range(n))
        for i in range(n):
            passed = grad[i] * hard_clip(row[i])
            v_q[c, i] = alpha * sign(row[i])
            dv[c, i] = {
                "exact": alpha * passed + of_alpha * sign(row[i]) / n,
                "detached": alpha * passed,
                "paper": alpha * passed + grad[i] / n,
                "code": passed,
            }[gradient]
    return v_q, dv


def xnorpp(v: Array, g: Array, gamma: Array) -> Found:
    signs = each(sign, v)
    dgamma = np.array([sum(s * x for s, x in zip(*row, strict=True)) for row in zip(signs, g, strict=True)])
    return signs * gamma[:, None], g * each(hard_clip, v) * gamma[:, None], dgamma


def reactnet_input(v: Array, g: Array, bias: Array) -> Found:
    shifted = v + bias
    dv = g * each(approx_sign, shifted)
    return each(sign, shifted), dv, np.array([sum(dv[:, c]) for c in range(v.shape[1])])


def irnet(v: Array, g: Array, t: float, k: float) -> Found:
    v_q, dv = np.empty_like(v), np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        values, derivative = jacobian(row, correction=1)
        s = 2.0 ** round(math.log2(mean_magnitude(values)))
        v_q[c] = [s * sign(x) for x in values]
        dv[c] = through(np.array([s * x * ede(at, t, k) for x, at in zip(grad, values, strict=True)]), derivative)
    return v_q, dv


def recu_bound(v: Array, tau: float) -> float:
    """Q, over the layer."""
    w1 = np.array([jacobian(row, 1, 1e-5)[0] * 2 * math.sqrt(2) for row in v])
    return -mean_magnitude(w1) * math.log(2 - 2 * tau)


def recu_weight(v: Array, g: Array, alpha: Array, tau: float) -> Found:
    bound, factor = recu_bound(v, tau), 2 * math.sqrt(2)
    v_q, dv, dalpha = np.empty_like(v), np.empty_like(v), np.zeros_like(alpha)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        values, derivative = jacobian(row, 1, 1e-5)
        v_q[c] = [alpha[c] * sign(clip(factor * x, -bound, bound)) for x in values]
        dw1 = [alpha[c] * x * (abs(factor * at) <= bound) for x, at in zip(grad, values, strict=True)]
        dv[c] = through(np.array(dw1), factor * derivative)
        dalpha[c] = sum(x * sign(at) for x, at in zip(grad, values, strict=True))
    return v_q, dv, dalpha


def recu_input(v: Array, g: Array, training: bool) -> Found:
    if not training:
        return bnn(v, g, approx_sign)
    dv = np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        values, derivative = jacobian(row, 1, 1e-5, centred=False)
        dv[c] = through(grad * each(approx_sign, values), derivative)
    return each(sign, v), dv


def adabin_weight(v: Array, g: Array, t: float, k: float) -> Found:
    v_q, dv = np.empty_like(v), np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        n, beta = len(row), sum(row) / len(row)
        alpha = math.sqrt(sum((x - beta) ** 2 for x in row) / n)
        values, derivative = jacobian(row, correction=0)
        v_q[c] = [alpha * sign(x) + beta for x in values]
        dvalues = np.array([alpha * x * ede(at, t, k) for x, at in zip(grad, values, strict=True)])
        dalpha = sum(x * sign(at) for x, at in zip(grad, values, strict=True))
        # ∂alpha/∂w_j = (w_j − beta) / (n alpha), ∂beta/∂w_j = 1/n
        dv[c] = through(dvalues, derivative) + dalpha * (row - beta) / (n * alpha) + sum(grad) / n
    return v_q, dv


def adabin_input(v: Array, g: Array, alpha: float, beta: float, offset: str) -> Found:
    z = (v - beta) / alpha
    signs, d = each(sign, z), each(approx_sign, z)
    if offset == "paper":
        return alpha * signs + beta, g * d, np.sum(g * (signs - d * z)), np.sum(g * (1 - d))
    return alpha * (signs + beta), g * d, np.sum(g * (signs + beta - d * z)), np.sum(g * (alpha - d))


def reste_weight(v: Array, g: Array, o: float) -> Found:
    scale = mean_magnitude(v)
    of_scale = np.sum(g * each(sign, v)) / v.size
    return scale * each(sign, v), g * scale * each(lambda w: reste_slope(w, o), v) + of_scale * each(sign, v)


def scale_map(v: Array, kernel: int, padding: int, groups: int) -> Array:
    """XNOR-Net's K of ``(C, H, W)``: mean magnitude over a group's channels and under the kernel; 0 outside."""
    channels, height, width = v.shape
    size = channels // groups
    high, wide = height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1
    k = np.zeros((groups, high, wide))
    for group, y, x, c, i, j in product(*map(range, (groups, high, wide, size, kernel, kernel))):
        row, column = y + i - padding, x + j - padding
        if 0 <= row < height and 0 <= column < width:
            k[group, y, x] += abs(v[group * size + c, row, column]) / (size * kernel**2)
    return k


# Uniform


def dorefa_weight(v: Array, g: Array, bits: int, detach: bool = True) -> Found:
    if bits == 1:
        return mean_magnitude(v) * each(sign, v), g
    t, n = each(math.tanh, v), 2**bits - 1
    m = max(abs(x) for x in t.flat)
    v_q = each(lambda x: 2 * round((x / (2 * m) + 0.5) * n) / n - 1, t)
    dt = g / m
    if not detach:
        largest = [index for index, x in np.ndenumerate(t) if abs(x) == m]
        for index in largest:  # which share the gradient of the maximum equally
            dt[index] -= sign(float(t[index])) * np.sum(g * t) / m**2 / len(largest)
    return v_q, dt * (1 - t**2)


def dorefa_input(v: Array, g: Array, bits: int) -> Found:
    n = 2**bits - 1
    return each(lambda x: round(n * clip(x, 0, 1)) / n, v), each(lambda x, grad: grad * (0 <= x <= 1), v, g)


def dorefa_gradient(v: Array, g: Array, noise: Array, bits: int) -> Found:
    """``noise`` in [0, 1)."""
    n, v_q = 2**bits - 1, np.empty_like(v)
    for c, row in enumerate(v):
        m = max(abs(x) for x in row)
        inner = [clip(x / (2 * m) + 0.5 + (u - 0.5) / n, 0, 1) for x, u in zip(row, noise[c], strict=True)]
        v_q[c] = [2 * m * (round(n * x) / n - 0.5) for x in inner]
    return v_q, g


def pact(v: Array, g: Array, alpha: float, bits: int) -> Found:
    n = 2**bits - 1
    v_q = each(lambda x: round(n * clip(x, 0, alpha) / alpha) * alpha / n, v)
    dalpha = sum(grad for x, grad in zip(v.flat, g.flat, strict=True) if x >= alpha)
    return v_q, each(lambda x, grad: grad * (0 <= x < alpha), v, g), dalpha


def lsq(
    v: Array,
    g: Array,
    step: Array,
    low: int,
    high: int,
    count: int,
    axis: int | None = None,
    strict: bool = False,
) -> Found:
    """One step, or one for each place along ``axis``; ``count`` values share it. From −1 to 1 there are two levels."""
    steps = np.zeros_like(v) + (step[:, None] if axis == 0 else step)
    level = sign if (low, high) == (-1, 1) else lambda z: float(round(clip(z, low, high)))
    z = v / steps

    def slope(x: float) -> float:
        return low if x <= low else high if x >= high else level(x) - x

    passes = each(lambda x: low < x < high if strict else low <= x <= high, z)
    dstep = np.sum(g * each(slope, z), axis=None if axis is None else 1 - axis)
    return each(level, z) * steps, g * passes, dstep / math.sqrt(count * high)


def lsq_plus(v: Array, g: Array, step: float, beta: float, high: int, count: int) -> Found:
    z, scale = (v - beta) / step, 1 / math.sqrt(count * high)
    outside = each(lambda x: x < 0 or x > high, z)
    slope = each(lambda x: 0 if x < 0 else high if x > high else round(x) - x, z)
    v_q = each(lambda x: round(clip(x, 0, high)) * step + beta, z)
    return v_q, g * (1 - outside), np.sum(g * slope) * scale, np.sum(g * outside) * scale


def n2uq_weight(v: Array, g: Array, bits: int, rescale: bool) -> Found:
    v_q, dv, n = np.empty_like(v), np.empty_like(v), (2**bits - 1) / 2
    for c, row in enumerate(v):
        scale = (2**bits - 1) / 2 ** (bits - 1) * mean_magnitude(row)
        v_q[c] = [scale * (round((clip(w / scale, -1, 1) + 1) * n) / n - 1) for w in row]
        dv[c] = g[c] / scale if rescale else g[c]
    return v_q, dv


def n2uq_input(v: Array, g: Array, widths: Array, start: float, input_scale: float, output_scale: float) -> Found:
    count, level = len(widths), 2 / len(widths)
    v_q, dv, dwidths = np.zeros_like(v), np.zeros_like(v), np.zeros(count)
    dstart = dinput = doutput = 0.0
    for at, x in np.ndenumerate(v):
        z, left = x * input_scale, start
        for i, width in enumerate(widths):
            v_q[at] += output_scale * level * (z > left + width / 2)
            if left < z <= left + width:
                h = g[at] * output_scale * level / width
                dv[at], dinput, dstart = h * input_scale, dinput + h * x, dstart - h
                dwidths[:i] -= h  # what lies before moves the left end
                dwidths[i] -= h * (z - left) / width
            left += width
        doutput += g[at] * v_q[at] / output_scale
    return v_q, dv, dwidths, dstart, dinput, doutput


def dsq(v: Array, g: Array, lower: float, upper: float, alpha: float, bits: int) -> Found:
    n = 2**bits - 1
    step, steepness = (upper - lower) / n, math.log(2 / alpha - 1)
    v_q, dv = np.empty_like(v), np.zeros_like(v)
    dlower = dupper = dalpha = 0.0
    for at, x in np.ndenumerate(v):
        if not lower <= x <= upper:
            v_q[at] = lower if x < lower else upper
            dlower, dupper = dlower + g[at] * (x < lower), dupper + g[at] * (x > upper)
            continue
        z = (x - lower) / step
        i = min(math.floor(z), n - 1)
        tanh = math.tanh(steepness * (z - i - 0.5))
        level = i + (sign(tanh) + 1) / 2
        v_q[at] = lower + step * level
        dphi = steepness * (1 - tanh**2) / (1 - alpha)  # by z
        of_alpha = -2 / (alpha * (2 - alpha)) * (z - i - 0.5) * (1 - tanh**2) / (1 - alpha) + tanh / (1 - alpha) ** 2
        dv[at] = g[at] * step / 2 * dphi / step
        dlower += g[at] * (1 - level / n + step / 2 * dphi * (z / (n * step) - 1 / step))
        dupper += g[at] * (level / n - step / 2 * dphi * z / (n * step))
        dalpha += g[at] * step / 2 * of_alpha
    return v_q, dv, dlower, dupper, dalpha


def extent(values: Array, percentile: float, symmetric: bool) -> tuple[float, float]:
    ordered = sorted(abs(v) if symmetric else v for v in values.flat)
    rank = math.ceil(percentile * len(ordered) / 100)
    high = max(ordered[rank - 1], 0.0)
    return -high if symmetric else min(ordered[len(ordered) - rank], 0.0), high


def uniform(v: Array, g: Array, low: float, high: float, bits: int, symmetric: bool) -> Found:
    n = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    step = high / n if symmetric else (high - low) / n
    first, last = (-n, n) if symmetric else (-round(-low / step), n - round(-low / step))
    return each(lambda x: clip(round(x / step), first, last) * step, v), g * each(lambda x: low <= x <= high, v)


def minmax_weight(v: Array, g: Array, bits: int, symmetric: bool, percentile: float = 100) -> Found:
    rows = [uniform(w, x, *extent(w, percentile, symmetric), bits, symmetric) for w, x in zip(v, g, strict=True)]
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


def int8_stochastic(v: Array, g: Array, noise: Array, bits: int) -> Found:
    """``noise`` in [0, 1)."""
    scales = np.array([[max(abs(x) for x in row) / (2 ** (bits - 1) - 1)] for row in v])
    return each(lambda x, s, u: s * math.floor(x / s + u), v, scales, noise), g


def fp8_numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """The non-negative numbers in the order of their codes."""
    bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    numbers = [m / ones * 2.0 ** (1 - bias) for m in range(ones)]
    numbers += [(1 + m / ones) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for m in range(ones)]
    return [number for number in numbers if number <= largest]


def fp8(v: Array, g: Array, format: str, dynamic: bool) -> Found:
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[format]
    numbers = fp8_numbers(*{"e4m3": (4, 3), "e5m2": (5, 2)}[format], largest)
    scale = max(abs(x) for x in v.flat) / largest if dynamic else 1.0

    def nearest(x: float) -> float:
        code = min(range(len(numbers)), key=lambda code: (abs(numbers[code] - abs(x)), code % 2))  # half to even codes
        return math.copysign(numbers[code], x)

    passes = each(lambda x: dynamic or abs(x) <= largest, v)
    return each(lambda x: scale * nearest(x / scale), v), g * passes


# Ternary, powers of two


def twn(v: Array, g: Array, threshold: float, per_channel: bool) -> Found:
    v_q = np.zeros_like(v)
    for part in range(len(v)) if per_channel else [slice(None)]:
        bound = threshold * mean_magnitude(v[part])
        above = [abs(w) for w in v[part].flat if abs(w) > bound]
        alpha = sum(above) / max(len(above), 1)
        v_q[part] = alpha * each(ternary_sign, v[part]) * (abs(v[part]) > bound)
    return v_q, g


def ttq(v: Array, g: Array, positive: float, negative: float, threshold: float) -> Found:
    bound = threshold * max(abs(w) for w in v.flat)
    v_q = each(lambda w: positive if w > bound else -negative if w < -bound else 0.0, v)
    dv = each(lambda w, x: x * (positive if w > bound else negative if w < -bound else 1.0), v, g)
    pairs = list(zip(v.flat, g.flat, strict=True))
    dpositive, dnegative = sum(x for w, x in pairs if w > bound), -sum(x for w, x in pairs if w < -bound)
    return v_q, dv, dpositive, dnegative


def inq(v: Array, g: Array, bits: int, portion: float) -> Found:
    n1 = math.floor(math.log2(4 * max(abs(w) for w in v.flat) / 3))
    n2 = n1 + 1 - 2 ** (bits - 1) // 2
    levels = [0.0, *(2.0**n for n in range(n2, n1 + 1))]

    def level(w: float) -> float:
        for alpha, beta in pairwise(levels):
            if (alpha + beta) / 2 <= abs(w) < 3 * beta / 2:
                return math.copysign(beta, w)
        return 0.0

    flat, v_q, dv = v.ravel(), v.copy(), g.copy()
    largest_first = sorted(range(v.size), key=lambda i: -abs(flat[i]))  # of equal ones the first in memory
    for i in largest_first[: round(portion * v.size)]:
        v_q.flat[i], dv.flat[i] = level(flat[i]), 0.0
    return v_q, dv


def shift_q(v: Array, g: Array, bits: int, noise: float | None = None) -> Found:
    """``noise`` in [0, 1) rounds stochastically."""

    def level(w: float) -> float:
        if w == 0:
            return 0.0
        exponent = round(math.log2(abs(w))) if noise is None else math.floor(math.log2(abs(w)) + noise)
        return math.copysign(2.0 ** clip(exponent, -(2 ** (bits - 1) - 1), 0), w)

    return each(level, v), g


def shift_ps(shift: Array, g: Array, signs: Array, bits: int, noise: float | None = None) -> Found:
    """The quantized weight and the gradients of shift and sign."""
    whole = round if noise is None else lambda x: math.floor(x + noise)
    low = -(2 ** (bits - 1) - 2)
    w_q = each(lambda e, s: 2.0 ** clip(whole(e), low, 0) * ternary_sign(whole(s)), shift, signs)
    return w_q, g * w_q * math.log(2), g


def fixed_point(v: Array, g: Array, integer_bits: int, fraction_bits: int) -> Found:
    bound, steps = 2.0 ** (integer_bits - 1), 2.0**fraction_bits
    return each(lambda x: clip(math.floor(x * steps) / steps, -bound, bound), v), g


GRIDS: dict[int, Sequence[Fraction]] = {  # exact, so that half way between two levels is half way
    1: [Fraction(0), Fraction(1)],
    2: [Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(1)],
    3: [Fraction(tenths, 10) for tenths in (0, 1, 2, 3, 4, 6, 8, 10)],
    4: sorted((Fraction(a, 32) + Fraction(b, 64)) / Fraction(3, 4) for a, b in product((0, 1, 4, 16), (0, 1, 4, 16))),
}


def nearest_level(z: Fraction, bits: int) -> float:
    """The smaller one half way between two."""
    return float(min(GRIDS[bits], key=lambda level: (abs(z - level), level)))


def apot_weight(v: Array, g: Array, alpha: float, bits: int, variant: str) -> Found:
    values, derivative = jacobian(v.ravel(), correction=1)
    z, grad = values / alpha, g.ravel()
    q = each(lambda x: nearest_level(Fraction(min(abs(x), 1.0)), bits - 1) * ternary_sign(x), z)
    dalpha = sum(grad * each(lambda x, level: ternary_sign(x) if abs(x) > 1 else level - x, z, q))
    if variant == "imagenet":
        passed = grad if bits == 2 else grad * each(lambda x: abs(x) <= 1, z)
        dv = through(passed, derivative)
    else:  # mean and deviation are constants
        dv = grad / np.std(v, ddof=1)
    return (alpha * q).reshape(v.shape), dv.reshape(v.shape), dalpha


def apot_input(v: Array, g: Array, alpha: float, bits: int, variant: str) -> Found:
    def parts(x: float) -> tuple[float, float, float]:
        """Value, slope by x, slope by alpha."""
        z = Fraction(x) / Fraction(alpha)
        q = nearest_level(min(max(z, Fraction(0)), Fraction(1)), bits)
        if z > 1:
            return alpha, 0.0, 1.0
        if z < 0 and variant == "imagenet":
            return 0.0, 0.0, 0.0
        return alpha * q, 1.0, q - float(z)

    found = np.array([parts(x) for x in v.flat])
    v_q, slope, of_alpha = (found[:, i].reshape(v.shape) for i in range(3))
    return v_q, g * slope, np.sum(g * of_alpha)
