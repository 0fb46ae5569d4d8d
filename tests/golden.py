"""Every quantizer's forward and gradients, written a second time: numpy in float64, loops, nothing of qconv or torch.

And the table of all methods. A new method needs its definition and its row in `QUANTIZERS` and `SCHEMES` here, a new
surrogate in `SURROGATES`, and nothing in any other test: every test that runs over all methods has it by that.

A definition takes values (those of weights as rows, one for each filter), the gradient of the quantized values, the
learned tensors, and the arguments of the quantizer by their names, with their defaults. Where its signature names them,
it is also given ``d``, the derivative that the surrogate stands for; ``dim``, the dimension of the channels; ``noise``
in [0, 1), what a random stream draws; ``training``; and ``progress``. It returns the quantized values, the gradient of
the values, and that of each learned tensor, as the papers and their code have them.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Scalar = Callable[[float], float]
Found = tuple[Any, ...]
Slow = Callable[..., Any]

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


def rows(values: Array) -> Array:
    """One row for each sample; a tensor of one dimension is one sample."""
    return values.reshape(1 if values.ndim == 1 else len(values), -1)


def along(vector: Array, values: Array, dim: int) -> Array:
    """``vector``, one element for each channel, so that it broadcasts against ``values``."""
    shape = [1] * values.ndim
    shape[dim] = -1
    return np.reshape(vector, shape)


def over_channels(values: Array, dim: int) -> Array:
    """The sum for each channel."""
    return np.moveaxis(values, dim, 0).reshape(values.shape[dim], -1).sum(1)


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


def hard_clip(v: float, clip: float = 1.0) -> float:
    return float(abs(v) <= clip)


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


def swish_sign(v: float, beta: float = 5.0) -> float:
    return beta * (2 - beta * v * math.tanh(beta * v / 2)) / (1 + math.cosh(beta * v))


def fourier(v: float, terms: float, omega: float = 0.1) -> float:
    return 4 * omega / math.pi * sum(math.cos((2 * i + 1) * omega * v) for i in range(int(terms))) * (abs(v) <= 1)


# Binary


def identity(v: Array, g: Array) -> Found:
    return v, g


def bnn(v: Array, g: Array, d: Scalar, noise: Array | None = None, stochastic: bool = False) -> Found:
    v_q = each(sign, v) if noise is None else each(lambda x, u: 1.0 if (x + 1) / 2 > u else -1.0, v, noise)
    assert stochastic == (noise is not None)
    return v_q, each(lambda x, grad: grad * d(x), v, g)


def scaled_sign(v: Array, g: Array, d: Scalar, detach_scale: bool = False, paper_gradient: bool = False) -> Found:
    v_q, dv = np.empty_like(v), np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        n, alpha = len(row), mean_magnitude(row)
        of_alpha = sum(grad[j] * sign(row[j]) for j in range(n))
        for i in range(n):
            v_q[c, i] = alpha * sign(row[i])
            rest = 0 if detach_scale else grad[i] / n if paper_gradient else of_alpha * sign(row[i]) / n
            dv[c, i] = alpha * grad[i] * d(row[i]) + rest
    return v_q, dv


def bireal_weight(v: Array, g: Array, d: Scalar, gradient: str = "code") -> Found:
    v_q, dv = scaled_sign(v, g, d, detach_scale=True)
    return v_q, dv if gradient == "paper" else bnn(v, g, d)[1]


def xnorpp(v: Array, g: Array, gamma: Array, d: Scalar) -> Found:
    signs, dv = bnn(v, g, d)
    dgamma = np.array([sum(s * x for s, x in zip(*row, strict=True)) for row in zip(signs, g, strict=True)])
    return signs * gamma[:, None], dv * gamma[:, None], dgamma


def reactnet_input(v: Array, g: Array, bias: Array, d: Scalar, dim: int) -> Found:
    signs, dv = bnn(v + along(bias, v, dim), g, d)
    return signs, dv, over_channels(dv, dim)


def irnet(v: Array, g: Array, d: Scalar) -> Found:
    v_q, dv = np.empty_like(v), np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        values, derivative = jacobian(row, correction=1)
        s = 2.0 ** round(math.log2(mean_magnitude(values)))
        v_q[c] = [s * sign(x) for x in values]
        dv[c] = through(np.array([s * x * d(at) for x, at in zip(grad, values, strict=True)]), derivative)
    return v_q, dv


def recu_bound(v: Array, tau: float) -> float:
    """Q, over the layer."""
    w1 = np.array([jacobian(row, 1, 1e-5)[0] * 2 * math.sqrt(2) for row in v])
    return -mean_magnitude(w1) * math.log(2 - 2 * tau)


def recu_weight(v: Array, g: Array, alpha: Array, tau: float, d: Scalar, scale_init: str = "uniform") -> Found:
    bound, factor = recu_bound(v, tau), 2 * math.sqrt(2)
    v_q, dv, dalpha = np.empty_like(v), np.empty_like(v), np.zeros_like(alpha)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        values, derivative = jacobian(row, 1, 1e-5)
        w1 = factor * values
        v_q[c] = [alpha[c] * sign(clip(x, -bound, bound)) for x in w1]
        dw1 = [alpha[c] * x * d(at) * (abs(at) <= bound) for x, at in zip(grad, w1, strict=True)]
        dv[c] = through(np.array(dw1), factor * derivative)
        dalpha[c] = sum(x * sign(at) for x, at in zip(grad, w1, strict=True))
    return v_q, dv, dalpha


def of_sine(v: Array, g: Array, alpha: Array, frequency: float, d: Scalar | None = None) -> Found:
    """The sine itself, or with ``d`` its sign."""
    v_q, dv, dalpha = np.empty_like(v), np.empty_like(v), np.zeros_like(alpha)
    for c, i in product(range(len(v)), range(v.shape[1])):
        sine, cosine = math.sin(frequency * v[c, i]), math.cos(frequency * v[c, i])
        level, slope = (sine, 1.0) if d is None else (sign(sine), d(sine))
        v_q[c, i] = alpha[c] * level
        dv[c, i] = g[c, i] * alpha[c] * slope * frequency * cosine
        dalpha[c] += g[c, i] * level
    return v_q, dv, dalpha


def sine_weight(v: Array, g: Array, alpha: Array, frequency: float = 20.0, scale_init: str = "uniform") -> Found:
    return of_sine(v, g, alpha, frequency)


def biper_weight(
    v: Array, g: Array, alpha: Array, d: Scalar, frequency: float = 20.0, scale_init: str = "uniform"
) -> Found:
    return of_sine(v, g, alpha, frequency, d)


def recu_input(v: Array, g: Array, d: Scalar, training: bool) -> Found:
    if not training:
        return bnn(v, g, d)
    dv = np.empty_like(rows(v))
    for c, (row, grad) in enumerate(zip(rows(v), rows(g), strict=True)):
        values, derivative = jacobian(row, 1, 1e-5, centred=False)
        dv[c] = through(grad * each(d, values), derivative)
    return each(sign, v), dv.reshape(v.shape)


def siman_weight(v: Array, g: Array, alpha: Array, d: Scalar, percent: float = 15.0) -> Found:
    v_q, dv, dalpha = np.empty_like(v), np.empty_like(v), np.zeros_like(alpha)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        values, derivative = jacobian(row, 1, 1e-5)
        order = sorted(range(len(row)), key=lambda i: -abs(values[i]))  # the first of equal ones is first
        b = np.array([1.0 if order.index(i) < len(row) // 2 else -1.0 for i in range(len(row))])
        v_q[c], dalpha[c] = alpha[c] * b, sum(grad * b)
        smallest = abs(values[order[len(row) // 2 - 1]])
        slope = each(lambda x, m=smallest: d(abs(x) - m), values)
        dv[c] = through(alpha[c] * grad * slope * np.sign(values), derivative)
    return v_q, dv, dalpha


def siman_input(v: Array, g: Array, d: Scalar) -> Found:
    v_q, dv = np.empty_like(rows(v)), np.empty_like(rows(v))
    for c, (row, grad) in enumerate(zip(rows(v), rows(g), strict=True)):
        values, derivative = jacobian(row, 1, 1e-5)
        v_q[c], dv[c] = each(sign, values), through(grad * each(d, values), derivative)
    return v_q.reshape(v.shape), dv.reshape(v.shape)


def adabin_weight(v: Array, g: Array, d: Scalar) -> Found:
    v_q, dv = np.empty_like(v), np.empty_like(v)
    for c, (row, grad) in enumerate(zip(v, g, strict=True)):
        n, beta = len(row), sum(row) / len(row)
        alpha = math.sqrt(sum((x - beta) ** 2 for x in row) / n)
        values, derivative = jacobian(row, correction=0)
        v_q[c] = [alpha * sign(x) + beta for x in values]
        dvalues = np.array([alpha * x * d(at) for x, at in zip(grad, values, strict=True)])
        dalpha = sum(x * sign(at) for x, at in zip(grad, values, strict=True))
        # ∂alpha/∂w_j = (w_j − beta) / (n alpha), ∂beta/∂w_j = 1/n
        dv[c] = through(dvalues, derivative) + dalpha * (row - beta) / (n * alpha) + sum(grad) / n
    return v_q, dv


def adabin_input(v: Array, g: Array, alpha: float, beta: float, d: Scalar, offset: str = "paper") -> Found:
    z = (v - beta) / alpha
    signs, slope = each(sign, z), each(d, z)
    if offset == "paper":
        return alpha * signs + beta, g * slope, np.sum(g * (signs - slope * z)), np.sum(g * (1 - slope))
    return alpha * (signs + beta), g * slope, np.sum(g * (signs + beta - slope * z)), np.sum(g * (alpha - slope))


def reste_weight(v: Array, g: Array, d: Scalar) -> Found:
    scale = mean_magnitude(v)
    of_scale = np.sum(g * each(sign, v)) / v.size
    return scale * each(sign, v), g * scale * each(d, v) + of_scale * each(sign, v)


# Uniform


def dorefa_weight(v: Array, g: Array, bits: int = 1, detach_max: bool = True) -> Found:
    if bits == 1:
        return mean_magnitude(v) * each(sign, v), g
    t, n = each(math.tanh, v), 2**bits - 1
    m = max(abs(x) for x in t.flat)
    v_q = each(lambda x: 2 * round((x / (2 * m) + 0.5) * n) / n - 1, t)
    dt = g / m
    if not detach_max:
        largest = [index for index, x in np.ndenumerate(t) if abs(x) == m]
        for index in largest:  # which share the gradient of the maximum equally
            dt[index] -= sign(float(t[index])) * np.sum(g * t) / m**2 / len(largest)
    return v_q, dt * (1 - t**2)


def dorefa_input(v: Array, g: Array, bits: int = 2) -> Found:
    n = 2**bits - 1
    return each(lambda x: round(n * clip(x, 0, 1)) / n, v), each(lambda x, grad: grad * (0 <= x <= 1), v, g)


def dorefa_gradient(v: Array, g: Array, noise: Array, bits: int = 6) -> Found:
    n, v_q = 2**bits - 1, np.empty_like(rows(v))
    for c, row in enumerate(rows(v)):
        m = max(abs(x) for x in row)
        inner = [clip(x / (2 * m) + 0.5 + (u - 0.5) / n, 0, 1) for x, u in zip(row, rows(noise)[c], strict=True)]
        v_q[c] = [2 * m * (round(n * x) / n - 0.5) for x in inner]
    return v_q.reshape(v.shape), g


def pact(v: Array, g: Array, alpha: float, bits: int = 4) -> Found:
    n = 2**bits - 1
    v_q = each(lambda x: round(n * clip(x, 0, alpha) / alpha) * alpha / n, v)
    dalpha = sum(grad for x, grad in zip(v.flat, g.flat, strict=True) if x >= alpha)
    return v_q, each(lambda x, grad: grad * (0 <= x < alpha), v, g), dalpha


def sawb(v: Array, g: Array, bits: int = 4, zero: bool = False, per_channel: bool = False, plus: bool = False) -> Found:
    by_levels = {4: (3.12, -2.064), 8: (7.509, -6.892), 16: (12.68, -12.80), 3: (2.6, -1.71), 15: (12.035, -12.03)}
    c0, c1 = by_levels[2**bits - zero]
    v_q, dv = np.zeros_like(v), np.zeros_like(v)
    for part in range(len(v)) if per_channel else [slice(None)]:
        end = c0 * math.sqrt(float(np.mean(v[part] ** 2))) + c1 * mean_magnitude(v[part])
        if end <= mean_magnitude(v[part]) / 10:
            end = float(np.abs(v[part]).max())
        levels = np.linspace(-end, end, 2**bits - zero)
        position = (
            (np.clip(v[part], -end, end) + end) / (2 * end) * (len(levels) - 1) if end else np.zeros_like(v[part])
        )
        v_q[part] = levels[each(round, position).astype(int)]
        dv[part] = g[part] * (np.abs(v[part]) <= end) if not plus else g[part]
    return v_q, dv


def ewgs_part(v: Array, g: Array, lower: float, upper: float, bits: int, delta: float) -> Found:
    """The rounded place in the range, the gradient of the values, and of both ends, from that of the place."""
    n, width = 2**bits - 1, upper - lower
    q, dv, dlower, dupper = np.empty_like(v), np.zeros_like(v), 0.0, 0.0
    for at, x in np.ndenumerate(v):
        z = (x - lower) / width
        q[at] = round(n * clip(z, 0, 1)) / n
        if 0 <= z <= 1:
            h = g[at] * (1 + delta * np.sign(g[at]) * (z - q[at]))
            dv[at] = h / width
            dlower += h * (x - upper) / width**2
            dupper -= h * (x - lower) / width**2
    return q, dv, dlower, dupper


def ewgs_weight(v: Array, g: Array, lower: float, upper: float, scale: float, delta: float, bits: int = 4) -> Found:
    q, dv, dlower, dupper = ewgs_part(v, 2 * scale * g, lower, upper, bits, delta)
    return scale * (2 * q - 1), dv, dlower, dupper, np.sum(g * (2 * q - 1))


def ewgs_input(v: Array, g: Array, lower: float, upper: float, width: float, delta: float, bits: int = 4) -> Found:
    q, *grads = ewgs_part(v, width * g, lower, upper, bits, delta)
    return width * q, *grads


def learned_step(
    v: Array, g: Array, steps: Array | float, limits: tuple[int, int], strict: bool
) -> tuple[Array, Array, Array]:
    """LSQ: quantized values, their gradient, and what each gives the gradient of its step. −1 and 1 are two levels."""
    low, high = limits
    level = sign if limits == (-1, 1) else lambda z: float(round(clip(z, low, high)))
    z = v / steps

    def slope(x: float) -> float:
        return low if x <= low else high if x >= high else level(x) - x

    passes = each(lambda x: low < x < high if strict else low <= x <= high, z)
    return each(level, z) * steps, g * passes, g * each(slope, z)


def lsq_weight(
    v: Array,
    g: Array,
    step: Array,
    bits: int = 4,
    per_channel: bool = False,
    grad_scale: str = "paper",
    strict: bool = False,
) -> Found:
    low, high = (-1, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    count = v.shape[1] if per_channel and grad_scale == "paper" else v.size
    v_q, dv, dstep = learned_step(v, g, step[:, None] if per_channel else step, (low, high), strict)
    return v_q, dv, np.sum(dstep, axis=1 if per_channel else None) / math.sqrt(count * high)


def lsq_input(
    v: Array,
    g: Array,
    step: Array,
    dim: int,
    bits: int = 4,
    signed: bool = False,
    per_channel: bool = False,
    grad_scale: str = "paper",
    strict: bool = False,
) -> Found:
    low, high = (0, 2**bits - 1) if not signed else (-1, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    count = v.size if grad_scale == "numel" else rows(v).shape[1] // (v.shape[dim] if per_channel else 1)
    v_q, dv, dstep = learned_step(v, g, along(step, v, dim) if per_channel else step, (low, high), strict)
    return v_q, dv, (over_channels(dstep, dim) if per_channel else np.sum(dstep)) / math.sqrt(count * high)


def lsq_plus_input(v: Array, g: Array, step: float, beta: float, bits: int = 4, grad_scale: str = "paper") -> Found:
    high = 2**bits - 1
    z, scale = (v - beta) / step, 1 / math.sqrt((v.size if grad_scale == "numel" else rows(v).shape[1]) * high)
    outside = each(lambda x: x < 0 or x > high, z)
    slope = each(lambda x: 0 if x < 0 else high if x > high else round(x) - x, z)
    v_q = each(lambda x: round(clip(x, 0, high)) * step + beta, z)
    return v_q, g * (1 - outside), np.sum(g * slope) * scale, np.sum(g * outside) * scale


def n2uq_weight(v: Array, g: Array, bits: int = 2, rescale_grad: bool = True) -> Found:
    v_q, dv, n = np.empty_like(v), np.empty_like(v), (2**bits - 1) / 2
    for c, row in enumerate(v):
        scale = (2**bits - 1) / 2 ** (bits - 1) * mean_magnitude(row)
        v_q[c] = [scale * (round((clip(w / scale, -1, 1) + 1) * n) / n - 1) for w in row]
        dv[c] = g[c] / scale if rescale_grad else g[c]
    return v_q, dv


def n2uq_input(
    v: Array, g: Array, widths: Array, start: float, input_scale: float, output_scale: float, bits: int = 2
) -> Found:
    assert len(widths) == 2**bits - 1
    level = 2 / len(widths)
    v_q, dv, dwidths = np.zeros_like(v), np.zeros_like(v), np.zeros_like(widths)
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


def dsq(v: Array, g: Array, lower: float, upper: float, alpha: float, bits: int = 4) -> Found:
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


def percentile_weight(
    v: Array, g: Array, bits: int = 8, percentile: float = 99.9, symmetric: bool = True, per_channel: bool = True
) -> Found:
    found = [
        uniform(w, x, *extent(w if per_channel else v, percentile, symmetric), bits, symmetric)
        for w, x in zip(v, g, strict=True)
    ]
    return np.array([row[0] for row in found]), np.array([row[1] for row in found])


minmax_weight = partial(percentile_weight, percentile=100)


def input_range(
    v: Array,
    g: Array,
    low: Array,
    high: Array,
    dim: int,
    bits: int = 8,
    symmetric: bool = False,
    per_channel: bool = False,
    percentile: float = 100,
) -> Found:
    """The range has been found, by a percentile or without one."""
    if not per_channel:
        return uniform(v, g, float(low), float(high), bits, symmetric)
    parts = zip(np.moveaxis(v, dim, 0), np.moveaxis(g, dim, 0), low, high, strict=True)
    found = [uniform(x, grad, first, last, bits, symmetric) for x, grad, first, last in parts]
    return tuple(np.moveaxis(np.array([part[i] for part in found]), 0, dim) for i in (0, 1))


def int8_stochastic(v: Array, g: Array, noise: Array, bits: int = 8, per_sample: bool = True) -> Found:
    v_q = np.empty_like(rows(v))
    for c, row in enumerate(rows(v)):
        step = max(abs(x) for x in (row if per_sample else v.flat)) / (2 ** (bits - 1) - 1)
        v_q[c] = [step * math.floor(x / step + u) for x, u in zip(row, rows(noise)[c], strict=True)]
    return v_q.reshape(v.shape), g


def fp8_numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """The non-negative numbers in the order of their codes."""
    bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    numbers = [m / ones * 2.0 ** (1 - bias) for m in range(ones)]
    numbers += [(1 + m / ones) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for m in range(ones)]
    return [number for number in numbers if number <= largest]


def fp8(v: Array, g: Array, format: str = "e4m3", scale: str | None = "dynamic") -> Found:
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[format]
    numbers = fp8_numbers(*{"e4m3": (4, 3), "e5m2": (5, 2)}[format], largest)
    dynamic = scale == "dynamic"
    unit = max(abs(x) for x in v.flat) / largest if dynamic else 1.0

    def nearest(x: float) -> float:
        code = min(range(len(numbers)), key=lambda code: (abs(numbers[code] - abs(x)), code % 2))  # half to even codes
        return math.copysign(numbers[code], x)

    passes = each(lambda x: dynamic or abs(x) <= largest, v)
    return each(lambda x: unit * nearest(x / unit), v), g * passes


# Ternary, powers of two


def twn(v: Array, g: Array, threshold: float = 0.7, per_channel: bool = True) -> Found:
    v_q = np.zeros_like(v)
    for part in range(len(v)) if per_channel else [slice(None)]:
        bound = threshold * mean_magnitude(v[part])
        above = [abs(w) for w in v[part].flat if abs(w) > bound]
        alpha = sum(above) / max(len(above), 1)
        v_q[part] = alpha * each(ternary_sign, v[part]) * (abs(v[part]) > bound)
    return v_q, g


def ttq(v: Array, g: Array, positive: float, negative: float, threshold: float = 0.05) -> Found:
    bound = threshold * max(abs(w) for w in v.flat)
    v_q = each(lambda w: positive if w > bound else -negative if w < -bound else 0.0, v)
    dv = each(lambda w, x: x * (positive if w > bound else negative if w < -bound else 1.0), v, g)
    pairs = list(zip(v.flat, g.flat, strict=True))
    dpositive, dnegative = sum(x for w, x in pairs if w > bound), -sum(x for w, x in pairs if w < -bound)
    return v_q, dv, dpositive, dnegative


def inq(
    v: Array, g: Array, progress: float, weight_bits: int = 5, portions: Sequence[float] = (0.5, 0.75, 0.875, 1.0)
) -> Found:
    n1 = math.floor(math.log2(4 * max(abs(w) for w in v.flat) / 3))
    n2 = n1 + 1 - 2 ** (weight_bits - 1) // 2
    levels = [0.0, *(2.0**n for n in range(n2, n1 + 1))]

    def level(w: float) -> float:
        for alpha, beta in pairwise(levels):
            if (alpha + beta) / 2 <= abs(w) < 3 * beta / 2:
                return math.copysign(beta, w)
        return 0.0

    portion = portions[min(math.floor(progress * len(portions)), len(portions) - 1)]
    flat, v_q, dv = v.ravel(), v.copy(), g.copy()
    largest_first = sorted(range(v.size), key=lambda i: -abs(flat[i]))  # of equal ones the first in memory
    for i in largest_first[: round(portion * v.size)]:
        v_q.flat[i], dv.flat[i] = level(flat[i]), 0.0
    return v_q, dv


def shift_q(v: Array, g: Array, noise: Array | None, weight_bits: int = 5, rounding: str = "deterministic") -> Found:
    def level(w: float, u: float) -> float:
        if w == 0:
            return 0.0
        whole = round if rounding == "deterministic" else lambda x: math.floor(x + u)
        return math.copysign(2.0 ** clip(whole(math.log2(abs(w))), -(2 ** (weight_bits - 1) - 1), 0), w)

    return each(level, v, np.zeros_like(v) if noise is None else noise), g


def shift_ps(
    v: Array,
    g: Array,
    shift: Array,
    signs: Array,
    weight_bits: int = 5,
    noise: Array | None = None,
    sign_noise: Array | None = None,
) -> Found:
    """The quantized weight and the gradients of shift and sign; with noise both are rounded by it."""
    nearest = each(round, shift) if noise is None else np.floor(shift + noise)
    nearest_sign = each(round, signs) if sign_noise is None else np.floor(signs + sign_noise)
    low = -(2 ** (weight_bits - 1) - 2)
    w_q = each(lambda e, s: 2.0 ** clip(e, low, 0) * ternary_sign(s), nearest, nearest_sign)
    return w_q, g * w_q * math.log(2), g


def fixed_point(v: Array, g: Array, integer_bits: int = 16, fraction_bits: int = 16) -> Found:
    bound, steps = 2.0 ** (integer_bits - 1), 2.0**fraction_bits
    return each(lambda x: clip(math.floor(x * steps) / steps, -bound, bound - 1 / steps), v), g


GRIDS: dict[int, Sequence[Fraction]] = {  # exact, so that half way between two levels is half way
    1: [Fraction(0), Fraction(1)],
    2: [Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(1)],
    3: [Fraction(tenths, 10) for tenths in (0, 1, 2, 3, 4, 6, 8, 10)],
    4: sorted((Fraction(a, 32) + Fraction(b, 64)) / Fraction(3, 4) for a, b in product((0, 1, 4, 16), (0, 1, 4, 16))),
    5: sorted(
        (Fraction(a, 128) + Fraction(b, 128) + Fraction(c, 128)) / Fraction(100, 128)
        for a, b, c in product((0, 64, 16, 2), (0, 32, 8, 1), (0, 4))
    ),
}


def nearest_level(z: Fraction, bits: int) -> float:
    """The smaller one half way between two."""
    return float(min(GRIDS[bits], key=lambda level: (abs(z - level), level)))


def apot_weight(v: Array, g: Array, alpha: float, weight_bits: int = 4, variant: str = "cifar") -> Found:
    values, derivative = jacobian(v.ravel(), correction=1)
    z, grad = values / alpha, g.ravel()
    q = each(lambda x: nearest_level(Fraction(min(abs(x), 1.0)), weight_bits - 1) * ternary_sign(x), z)
    dalpha = sum(grad * each(lambda x, level: ternary_sign(x) if abs(x) > 1 else level - x, z, q))
    if variant == "imagenet":
        passed = grad if weight_bits == 2 else grad * each(lambda x: abs(x) <= 1, z)
        dv = through(passed, derivative)
    else:  # mean and deviation are constants
        dv = grad / np.std(v, ddof=1)
    return (alpha * q).reshape(v.shape), dv.reshape(v.shape), dalpha


def apot_input(v: Array, g: Array, alpha: float, input_bits: int = 4, variant: str = "cifar") -> Found:
    def parts(x: float) -> tuple[float, float, float]:
        """Value, slope by x, slope by alpha."""
        z = Fraction(x) / Fraction(alpha)
        q = nearest_level(min(max(z, Fraction(0)), Fraction(1)), input_bits)
        if z > 1:
            return alpha, 0.0, 1.0
        if z < 0:
            return 0.0, 0.0, 0.0
        return alpha * q, 1.0, q - float(z)

    found = np.array([parts(x) for x in v.flat])
    v_q, slope, of_alpha = (found[:, i].reshape(v.shape) for i in range(3))
    return v_q, g * slope, np.sum(g * of_alpha)


# The table


class Range(NamedTuple):
    """From ``low`` to ``high``; ``ends`` says whether each of them is in it."""

    low: float
    high: float
    ends: str = "[]"


POSITIVE = Range(0, math.inf, "()")
STEP = Range(2.0**-20, math.inf, "[)")


class Row(NamedTuple):
    """A quantizer made with ``args``, and the learned and scheduled tensors that it and its definition are given.

    Attributes:
        args: the arguments.
        tensors: the tensors, or what makes them from the values.
        values: in place of those that every quantizer of its kind is given.
        training: the mode.
        progress: how far the training is, where the tensors come from that; None where they do not.
    """

    args: dict[str, Any] = {}  # noqa: RUF012
    tensors: tuple[float | Array, ...] | Callable[[Array], tuple[Array, ...]] = ()
    values: Array | None = None
    training: bool = True
    progress: float | None = None


class Printed(NamedTuple):
    """What was printed for the first filter or sample: quantized values, their gradient, that of each learned tensor.

    None stands for what was not.
    """

    args: dict[str, Any]
    tensors: tuple[float | Array, ...]
    results: tuple[Any, ...]


class Entry(NamedTuple):
    """What the tests know of a quantizer or a surrogate.

    Attributes:
        definition: its forward and gradients; the derivative alone, of a surrogate.
        rows: the arguments and tensors to run it with.
        ranges: of each argument that is a number. What is True or False, or one of some words, is in the signature.
        given: ``"filters"``, to a weight's quantizer, or ``"inputs"``.
        levels: how many values a filter may take at the end of training, from the quantizer; None is ``2^bits``.
        printed: golden values of other origin.
        spreads: whether a statistic over all filters or samples goes into each of them, from the quantizer.
        exact: compiled code gives the same bits as eager: neither sums nor fused products come before the rounding.
        has_codes: it has integer codes.
    """

    definition: Slow
    rows: Sequence[Row] = (Row(),)
    ranges: dict[str, Range] = {}  # noqa: RUF012
    given: str = "inputs"
    levels: Callable[[Any], float] | None = None
    printed: Sequence[Printed] = ()
    spreads: Callable[[Any], bool] | None = None
    exact: bool = False
    has_codes: bool = True


PER_FILTER = np.array([0.8, -1.3, 0.6])
STEPS = np.array([0.4, 0.5, 0.25])
PER_CHANNEL = np.linspace(-0.75, 1.0, 8)  # shifted by these, some inputs are 0, and some ±1
FLOATS = np.array([[1.0625, -1.1875, 448, 449, -460, 2**-10, 3 * 2**-10, -0.0]])  # half way, the end, subnormal
SMALL = np.array([[1e-3, -3e-5, 1e-9, -0.35, 0.7071, 0.7072, 3.999, -4.1], [0.25, -0.2499, 4, -4, 7, -1e9, 1e-30, 0]])
SIGNS = np.array([-1.0] * 4 + [1.0] * 4)
W, G = FILTERS[0], GRAD_FILTERS[0]
X, GX = INPUTS[0], GRAD_INPUTS[0]
EVERY = range(1, 9)
BOTH = (True, False)
SCALES = ("paper", "numel")
VARIANTS = ("cifar", "imagenet")
SAWB_FORMS = ((2, False), (3, False), (4, False), (2, True), (4, True))
FROM_2 = range(2, 9)


def always(quantizer: Any) -> bool:
    return True


def per_layer(quantizer: Any) -> bool:
    return not quantizer.per_channel


def is_dynamic(quantizer: Any) -> bool:
    return quantizer.scale is not None


def per_tensor(quantizer: Any) -> bool:
    return not quantizer.per_sample


def odd(quantizer: Any) -> int:
    """The levels are as many above 0 as below."""
    return 2**quantizer.bits - 1


def odd_if_symmetric(quantizer: Any) -> int:
    return 2**quantizer.bits - quantizer.symmetric


def of_each_channel(quantizer: Any) -> int:
    """A sample has 6 channels."""
    return 2**quantizer.bits * (6 if quantizer.per_channel else 1)


def of_each_symmetric_channel(quantizer: Any) -> int:
    return odd_if_symmetric(quantizer) * (6 if quantizer.per_channel else 1)


def grid(*tensors: float | Array, values: Array | None = None, **choices: Sequence[Any]) -> list[Row]:
    """A row for each combination of the arguments, all with these tensors and values."""
    return [Row(dict(zip(choices, each, strict=True)), tensors, values) for each in product(*choices.values())]


def dsq_rows(low: float, exponent: int) -> list[Row]:
    """Of ranges with a step of ``2^(exponent - bits)``."""
    ends = ((b, low + (2**b - 1) * 2.0 ** (exponent - b)) for b in EVERY)
    return [Row({"bits": b}, (low, high, alpha)) for b, high in ends for alpha in (0.03, 0.2, 0.5)]


def shift_and_sign(v: Array) -> tuple[Array, ...]:
    """Some exponents and signs are at half steps."""
    return v - 1.5, v / 2


MASKED = [0, -0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8]
DW_DOREFA = [0.036588, -0.170713, 0.329322, -0.475049, 0.598272, 0.691684, 0.660362, -0.467261]
WIDTHS = {
    2: np.array([0.5, 0.25, 1.25]),
    3: np.array([0.25, 0.5, 0.125, 0.25, 0.125, 0.5, 0.25]),
    4: np.linspace(0.0625, 0.2, 15),
    8: np.linspace(0.002, 0.02, 255),
}
UNIFORM = [(b, s, c) for b in FROM_2 for s in (True, False) for c in (True, False)]


def extents(percentile: float, symmetric: bool, per_channel: bool) -> tuple[float | Array, ...]:
    if not per_channel:
        return extent(INPUTS, percentile, symmetric)
    high = np.linspace(0.5, 1.75, 8)
    return -high if symmetric else np.linspace(-1.5, -0.25, 8), high


SURROGATES: dict[str, Entry] = {
    "Straight": Entry(straight),
    "HardClip": Entry(hard_clip, [Row(), Row({"clip": 1.3})], {"clip": POSITIVE}),
    "ApproxSign": Entry(approx_sign, printed=[Printed({}, (), ([0, 0, 3.6, 8, 7, 3.6, 0, 0],))]),
    "EDE": Entry(
        ede,
        [Row({}, (0.1, 10.0)), Row({}, (1.0, 1.0)), Row({}, (4.0, 1.0))],
        {"t_min": Range(0, 10, "(]"), "t_max": Range(0.1, math.inf, "[)")},
        printed=[
            Printed({}, (0.1, 10.0), ([0.977833, 1.980133, 2.995205, 4, 4.995503, 5.970696, 6.930464, 7.746298],))
        ],
    ),
    "Polynomial": Entry(
        polynomial,
        [Row({}, (0.5, 2.0)), Row({}, (0.1**0.5, 0.1**-0.5)), Row({"input": True}, (1.0, 1.0))],
        {"t_min": Range(0, 10, "(]"), "t_max": Range(0.01, math.inf, "[)")},
    ),
    "ReSTE": Entry(
        reste_slope,
        [Row({}, (1.0,)), Row({}, (2.0,)), Row({}, (3.0,)), Row({"m": 0.25, "t": 1.0}, (2.0,))],
        {"o_max": Range(1, math.inf, "[)"), "m": Range(0, 1.5, "(]"), "t": Range(0.1, math.inf, "[)")},
        printed=[Printed({}, (3.0,), ([0.254381, 0.666667, 1.842016, 18.566355, 3.719072, 2.536869, 2.333333, 0],))],
    ),
    "Fourier": Entry(
        fourier,
        [Row({}, (10.0,)), Row({}, (19.0,)), Row({"omega": 2.0}, (1.0,)), Row({"omega": 3.0}, (4.0,))],
        {"omega": Range(0, math.pi, "()"), "n_min": Range(0, 18, "[]"), "n_max": Range(9, math.inf, "[)")},
    ),
    "SwishSign": Entry(swish_sign, [Row(), Row({"beta": 2.0})], {"beta": POSITIVE}),
}

QUANTIZERS: dict[str, Entry] = {
    "Identity": Entry(identity, levels=lambda q: math.inf, exact=True, has_codes=False),
    "Sign": Entry(
        bnn,
        [Row(), Row({"stochastic": True})],
        {"weight_clip": Range(0, math.inf, "(]")},
        printed=[Printed({}, (), ([-1, -1, -1, 1, 1, 1, 1, 1], [0, 2, 3, 4, 5, 6, 7, 0]))],
        exact=True,
    ),
    "ScaledSign": Entry(
        scaled_sign,
        [Row(), Row({"detach_scale": True}), Row({"paper_gradient": True})],
        {"weight_clip": Range(0, math.inf, "(]")},
        "filters",
        printed=[
            Printed(
                {}, (), (0.48125 * SIGNS, [-0.15, -0.24625, -0.005625, -0.3425, 0.390625, 0.43875, 0.486875, -0.235])
            ),
            Printed(
                {"paper_gradient": True},
                (),
                (None, [0.0125, -0.12125, 0.181875, -0.2425, 0.303125, 0.36375, 0.424375, -0.485]),
            ),
        ],
    ),
    "XNORppWeight": Entry(xnorpp, [Row({}, (PER_FILTER,))], {}, "filters", exact=True),
    "BiRealWeight": Entry(
        bireal_weight,
        [Row(), Row({"gradient": "paper"})],
        {},
        "filters",
        printed=[
            Printed({}, (), (0.48125 * SIGNS, MASKED)),
            Printed({"gradient": "paper"}, (), (0.48125 * SIGNS, 0.48125 * np.array(MASKED))),
        ],
    ),
    "ReActNetInput": Entry(reactnet_input, [Row({}, (PER_CHANNEL,))], exact=True),
    "IRNetWeight": Entry(irnet, [Row()], {}, "filters", printed=[Printed({}, (), (SIGNS,))]),
    "ReCUWeight": Entry(
        recu_weight,
        [Row({}, (PER_FILTER, tau)) for tau in (0.85, 0.9)],
        {"tau_min": Range(0.5, 0.99, "(]"), "tau_max": Range(0.85, 1.0, "[)")},
        "filters",
    ),
    "ReCUInput": Entry(recu_input, [Row(), Row(training=False)]),
    "SineWeight": Entry(
        sine_weight,
        [Row({}, (PER_FILTER,)), Row({"frequency": 5.0}, (PER_FILTER,))],
        {"frequency": POSITIVE},
        "filters",
        levels=lambda q: math.inf,
        has_codes=False,
    ),
    "BiPerWeight": Entry(
        biper_weight,
        [Row({}, (PER_FILTER,)), Row({"frequency": 5.0}, (PER_FILTER,))],
        {"frequency": POSITIVE},
        "filters",
    ),
    "SiManWeight": Entry(siman_weight, [Row({}, (PER_FILTER,))], {"percent": Range(0, 50, "[)")}, "filters"),
    "SiManInput": Entry(siman_input),
    "AdaBinWeight": Entry(
        adabin_weight, [Row()], {}, "filters", printed=[Printed({}, (), ([-0.677508] * 4 + [0.540008] * 4,))]
    ),
    "AdaBinInput": Entry(
        adabin_input,
        [Row({"offset": offset}, (1.25, 0.25)) for offset in ("paper", "code")],
        printed=[
            Printed({}, (1.2, 0.3), ([-0.9] * 4 + [1.5] * 4, [0, 0, 2.5, 6, 10, 8, 5.833333, 0])),
            Printed({"offset": "code"}, (1.2, 0.3), ([-0.84] * 4 + [1.56] * 4, [0, 0, 2.5, 6, 10, 8, 5.833333, 0])),
        ],
        exact=True,
    ),
    "ReSTEWeight": Entry(reste_weight, [Row()], {}, "filters", spreads=always),
    "TWN": Entry(
        twn,
        [Row(), Row({"threshold": 1.0}), Row({"threshold": 0.75, "per_channel": False})],
        {"threshold": POSITIVE},
        "filters",
        lambda q: 3,
        [
            Printed({"threshold": t, "per_channel": c}, (), ([-0.8, -0.8, 0, 0, 0, 0, 0.8, 0.8], G))
            for t in (0.7, 0.75)
            for c in (True, False)
        ],
        spreads=per_layer,
    ),
    "TTQ": Entry(
        ttq,
        [Row({"threshold": t}, (1.3, 0.7)) for t in (0.05, 0.2, 0.25)],
        {"threshold": Range(0, 1, "[)")},
        "filters",
        lambda q: 3,
        [
            Printed(
                {},
                (1.3, 0.7),
                (
                    [-0.7, -0.7, -0.7, -0.7, 0, 1.3, 1.3, 1.3],
                    [0.07, -0.14, 0.21, -0.28, 0.5, 0.78, 0.91, -1.04],
                    0.5,
                    0.2,
                ),
            )
        ],
        spreads=always,
    ),
    "INQ": Entry(
        inq,
        [
            Row({"weight_bits": b, **portions}, values=values, progress=progress)
            for b in (2, 3, 5, 7)
            for values in (None, FILTERS * 0.75)  # some are half way between two levels
            for portions, progress in (({}, 0.0), ({}, 0.3), ({}, 1.0), ({"portions": (0.25, 1.0)}, 0.49))
        ],
        {"weight_bits": Range(2, 7)},
        "filters",
        lambda q: 2 ** (q.bits - 1) + 1,
        exact=True,
        has_codes=False,
    ),
    "ShiftQ": Entry(
        shift_q,
        [
            row
            for values in (None, SMALL)
            for row in grid(values=values, weight_bits=FROM_2, rounding=("deterministic", "stochastic"))
        ],
        {"weight_bits": Range(2, 8)},
        "filters",
        lambda q: 2**q.bits + 1,  # the additional one is 0
        [
            Printed({}, (), ([-1, -0.5, -0.25, -0.125, 0.0625, 0.25, 0.5, 1], G)),
            Printed({"weight_bits": 3}, (), ([-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1], G)),
        ],
        exact=True,
    ),
    "ShiftPS": Entry(
        shift_ps,
        [Row({"weight_bits": b}, shift_and_sign) for b in FROM_2],
        {"weight_bits": Range(2, 8), "random_until": Range(0, 1)},
        "filters",
        odd,
        exact=True,
    ),
    "FixedPoint": Entry(
        fixed_point,
        [Row({"integer_bits": i, "fraction_bits": f}, values=v) for i, f in ((2, 1), (3, 2)) for v in (None, SMALL)]
        + [Row()],
        {"integer_bits": Range(1, 16), "fraction_bits": Range(0, 16)},  # beside the default of the other one
        levels=lambda q: 2**q.bits,
        exact=True,
    ),
    "APoTWeight": Entry(
        apot_weight,
        [row for alpha in (0.8, 1.5) for row in grid(alpha, weight_bits=(2, 3, 4, 5), variant=VARIANTS)],
        {"weight_bits": Range(2, 5)},
        "filters",
        odd,
        [
            Printed(
                {}, (1.5,), ([-1.5, -0.9, -0.3, 0, 0.15, 0.45, 0.9, 1.5], G / np.std(W, ddof=1), -0.0805175701518656)
            )
        ],
        spreads=always,
    ),
    "APoTInput": Entry(
        apot_input,
        # no value is half way but for its rounding
        grid(2.0, input_bits=(2, 4), variant=VARIANTS) + grid(1.0, input_bits=(3, 5), variant=VARIANTS),
        {"input_bits": Range(2, 5)},
        exact=True,
    ),
    "DoReFaWeight": Entry(
        dorefa_weight,
        grid(bits=EVERY, detach_max=BOTH),
        {"bits": Range(1, 8)},
        "filters",
        printed=[
            Printed({}, (), (0.48125 * SIGNS, G)),
            Printed({"bits": 2}, (), ([-1, -1 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, 1 / 3, 1], DW_DOREFA)),
            Printed({"bits": 4}, (), (np.array([-15, -9, -5, -1, 1, 3, 9, 13]) / 15, DW_DOREFA)),
        ],
        spreads=always,
    ),
    "DoReFaInput": Entry(
        dorefa_input,
        [Row({"bits": b}) for b in (*EVERY, 16)],
        {"bits": Range(1, 16)},
        printed=[
            Printed({}, (), ([0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1], [0, 0, 0, 4, 5, 6, 7, 0])),
            Printed({"bits": 4}, (), (np.array([0, 0, 0, 0, 4, 10, 15, 15]) / 15, [0, 0, 0, 4, 5, 6, 7, 0])),
        ],
        exact=True,
    ),
    "DoReFaGradient": Entry(dorefa_gradient, [Row({"bits": b}) for b in EVERY], {"bits": Range(1, 8)}, exact=True),
    "PACT": Entry(
        pact,
        [Row({"bits": b}, (alpha,)) for b in (*EVERY, 16) for alpha in (0.75, 1.0)],
        {"bits": Range(1, 16), "alpha": STEP},
        printed=[Printed({"bits": 2}, (1.0,), ([0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1], [0, 0, 0, 4, 5, 6, 0, 0], 15.0))],
        exact=True,
    ),
    "SAWB": Entry(
        sawb,
        [Row({"bits": b, "zero": z, "per_channel": c}) for b, z in SAWB_FORMS for c in (True, False)]
        + [Row({"bits": b, "zero": z, "plus": True}) for b, z in SAWB_FORMS],
        {"bits": Range(2, 4)},
        "filters",
        lambda q: 2**q.bits - q.zero,
        [
            Printed(
                {"bits": 2},
                (),
                (0.9180979 * np.array([-1, -1 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, 1 / 3, 1]), [0, *G[1:]]),
            ),
            Printed({"bits": 2, "zero": True}, (), (0.7698941 * np.array([-1, -1, 0, 0, 0, 0, 1, 1]), [0, *G[1:7], 0])),
            Printed({"bits": 3}, (), (1.2834452 * np.array([-7, -3, -1, -1, 1, 1, 3, 5]) / 7, G)),
        ],
        spreads=per_layer,
    ),
    "LSQ": Entry(
        lsq_weight,
        [Row({"bits": 1}, (0.5,))]
        + [Row({"bits": b}, (2.0 ** (1 - b),)) for b in FROM_2]
        + grid(STEPS, bits=EVERY, per_channel=(True,), grad_scale=SCALES)
        + grid(0.5, bits=EVERY, grad_scale=("numel",))
        + grid(0.5, bits=(1, 2, 3), strict=(True,)),
        {"bits": Range(1, 8)},
        "filters",
        printed=[
            Printed(
                {"bits": 2},
                (0.9624999999999999,),
                (0.9625 * np.array([-1, -1, 0, 0, 0, 0, 1, 1]), G, 0.10101525445522107),
            ),
            Printed(
                {},
                (0.36379080527138113,),
                (0.36379080527138113 * np.array([-3, -2, -1, 0, 0, 1, 1, 2]), G, 0.03419994397711499),
            ),
        ],
        exact=True,
    ),
    "LSQInput": Entry(
        lsq_input,
        [
            row
            for b in EVERY
            for row in grid(0.5 if b == 1 else 2.0 ** (1 - b), bits=(b,), signed=BOTH, grad_scale=SCALES)
        ]
        + grid(PER_CHANNEL + 1, bits=EVERY, signed=BOTH, per_channel=(True,), grad_scale=SCALES)
        + [Row({"bits": 2, "signed": True, "strict": True}, (0.5,))]
        + grid(2.0**-15, bits=(16,), signed=BOTH),
        {"bits": Range(1, 16), "step_init": STEP},
        levels=of_each_channel,
        printed=[
            Printed({"bits": 2}, (0.5,), ([0, 0, 0, 0, 0.5, 0.5, 1, 1.5], [0, 0, 0, 4, 5, 6, 7, 0], 4.817329827473585))
        ],
        exact=True,
    ),
    "LSQPlus": Entry(
        lsq_weight,
        grid(STEPS, bits=EVERY, per_channel=(True,), grad_scale=SCALES) + grid(0.5, bits=EVERY, grad_scale=SCALES),
        {"bits": Range(1, 8)},
        "filters",
        exact=True,
    ),
    "LSQPlusInput": Entry(
        lsq_plus_input,
        [row for b in (*EVERY, 16) for row in grid(2.0 ** (1 - b), -0.5, bits=(b,), grad_scale=SCALES)],
        {"bits": Range(1, 16)},
        printed=[
            Printed(
                {"bits": 2},
                (0.5, -0.2),
                (
                    [-0.2, -0.2, -0.2, -0.2, 0.3, 0.8, 0.8, 1.3],
                    [0, 0, 0, 4, 5, 6, 7, 0],
                    20.8 / math.sqrt(8 * 3),
                    14 / math.sqrt(8 * 3),
                ),
            )
        ],
    ),
    "N2UQWeight": Entry(
        n2uq_weight,
        grid(bits=FROM_2, rescale_grad=BOTH),
        {"bits": Range(2, 8)},
        "filters",
        printed=[
            Printed(
                {},
                (),
                (
                    [-0.721875, -0.721875, -0.240625, -0.240625, 0.240625, 0.240625, 0.721875, 0.721875],
                    [0.138528, -0.277056, 0.415584, -0.554113, 0.692641, 0.831169, 0.969697, -1.108225],
                ),
            )
        ],
    ),
    "N2UQInput": Entry(
        n2uq_input,
        [
            Row({"bits": b}, (widths, *others))
            for b, widths in WIDTHS.items()
            for others in ((-0.25, 1.0, 1.5), (0.0, 2.0, 0.75))
        ],
        {"bits": Range(2, 8)},
    ),
    "EWGSWeight": Entry(
        ewgs_weight,
        [Row({"bits": b}, (-1.5, 1.25, 0.75, d)) for b in EVERY for d in (0.0, 0.2)]
        + [Row({}, (-0.5, 1.0, 0.5, 1e-3))],
        {"bits": Range(1, 8), "delta": Range(0, 1, "[)")},
        "filters",
    ),
    "EWGSInput": Entry(
        ewgs_input,
        [Row({"bits": b}, (-0.75, 1.5, 1.25, d)) for b in EVERY for d in (0.0, 0.2)] + [Row({}, (0.0, 1.0, 2.0, 1e-3))],
        {"bits": Range(1, 8), "delta": Range(0, 1, "[)")},
    ),
    "DSQWeight": Entry(dsq, dsq_rows(-0.5, 1), {"bits": Range(1, 8), "alpha": Range(0.001, 0.5)}, "filters"),
    "DSQInput": Entry(dsq, dsq_rows(-1.0, 2), {"bits": Range(1, 8), "alpha": Range(0.001, 0.5)}),
    "MinMaxWeight": Entry(
        minmax_weight,
        grid(bits=FROM_2, symmetric=BOTH, per_channel=BOTH),
        {"bits": Range(2, 8)},
        "filters",
        odd_if_symmetric,
        spreads=per_layer,
        exact=True,
    ),
    "PercentileWeight": Entry(
        percentile_weight,
        [*grid(bits=FROM_2, symmetric=BOTH, per_channel=BOTH, percentile=(80.0,)), Row({"percentile": 90.0})],
        {"bits": Range(2, 8), "percentile": Range(50, 100, "(]")},
        "filters",
        odd_if_symmetric,
        spreads=per_layer,
        exact=True,
    ),
    "MinMaxInput": Entry(
        input_range,
        [Row({"bits": b, "symmetric": s, "per_channel": c}, extents(100, s, c)) for b, s, c in UNIFORM],
        {"bits": Range(2, 16)},
        levels=of_each_symmetric_channel,
        exact=True,
    ),
    "PercentileInput": Entry(
        input_range,
        [
            Row({"bits": b, "symmetric": s, "per_channel": c, "percentile": 80.0}, extents(80, s, c))
            for b, s, c in UNIFORM
        ],
        {"bits": Range(2, 16), "percentile": Range(50, 100, "(]")},
        levels=of_each_symmetric_channel,
        exact=True,
    ),
    "FP8": Entry(
        fp8,
        [
            Row({"format": format, "scale": scale}, values=values)
            for format, factor in (("e4m3", 1), ("e5m2", 128))
            for scale in ("dynamic", None)
            for values in (None, FLOATS * factor)
        ],
        levels=lambda q: {"e4m3": 253, "e5m2": 247}[q.format],
        spreads=is_dynamic,
        exact=True,
    ),
    "Int8Stochastic": Entry(
        int8_stochastic,
        grid(bits=FROM_2, per_sample=BOTH),
        {"bits": Range(2, 8)},
        levels=odd,
        spreads=per_tensor,
        exact=True,
    ),
}


class SchemeEntry(NamedTuple):
    """What the tests know of a scheme.

    Attributes:
        constants: arguments, and what a filter of zeros gives with them, and one of 0.7.
        variants: the arguments to make the scheme with, where all methods are run over.
    """

    constants: Sequence[tuple[dict[str, Any], tuple[float, float]]]
    variants: Sequence[dict[str, Any]] = ({},)


A = 0.7
SCHEMES: dict[str, SchemeEntry] = {
    "identity": SchemeEntry([({}, (0, A))]),
    "bnn": SchemeEntry([({}, (1, 1))], [{}, {"padding_value": 1}, {"stochastic": True}]),
    "bwn": SchemeEntry(
        [({}, (0, A)), ({"detach_scale": True}, (0, A))], [{}, {"detach_scale": True}, {"numel_gradient": True}]
    ),
    "xnor": SchemeEntry([({}, (0, A))], [{}, {"scale_map": True}, {"center": True, "paper_gradient": True}]),
    "xnorpp": SchemeEntry([({}, (1, 1))]),
    "bireal": SchemeEntry([({}, (0, A)), ({"gradient": "paper"}, (0, A))], [{}, {"gradient": "paper"}]),
    "reactnet": SchemeEntry([({}, (0, A))]),
    "irnet": SchemeEntry([({}, (0, 0)), ({"binary_input": False}, (0, 0))], [{}, {"binary_input": False}]),
    "recu": SchemeEntry([({"scale_init": "mean"}, (0, A))]),
    "adabin": SchemeEntry([({}, (0, A))], [{}, {"offset": "code"}]),
    "reste": SchemeEntry([({}, (0, A))]),
    "siman": SchemeEntry([({}, (0, A))]),
    "fda": SchemeEntry([({}, (0, A))]),
    "biper": SchemeEntry([({"scale_init": "mean"}, (0, A))], [{}, {"sine": True}, {"frequency": 5.0}]),
    "twn": SchemeEntry([({}, (0, A))], [{}, {"per_channel": False}]),
    "ttq": SchemeEntry([({}, (0, 1))]),
    "inq": SchemeEntry([({}, (0, A))]),
    "shift_q": SchemeEntry(
        [({}, (0, 0.5))], [{}, {"weight_bits": 3, "fixed_point": (4, 6)}, {"weight_bits": 4, "rounding": "stochastic"}]
    ),
    "shift_ps": SchemeEntry([({}, (0, 0.5))], [{}, {"weight_bits": 4, "rounding": "stochastic"}]),
    "apot": SchemeEntry([({}, (0, 0))], [{}, {"weight_bits": 2, "input_bits": None, "variant": "imagenet"}]),
    "dorefa": SchemeEntry(
        [({}, (0, A)), ({"weight_bits": 2}, (1 / 3, 1))], [{}, {"weight_bits": 2, "input_bits": 3, "grad_bits": 6}]
    ),
    "pact": SchemeEntry([({}, (1 / 15, 1))]),
    "sawb": SchemeEntry([({}, (0, A))], [{}, {"weight_bits": 2, "input_bits": 2, "zero": True, "per_channel": True}]),
    "lsq": SchemeEntry(
        [
            ({}, (0, 2 * A / math.sqrt(7))),
            ({"weight_bits": 1}, (2**-20, A)),
            ({"per_channel": True}, (0, 2 * A / math.sqrt(7))),
        ],
        [
            {},
            {"weight_bits": 1, "input_bits": 1, "signed_input": True},
            {"weight_bits": 3, "input_bits": 3, "per_channel": True},
        ],
    ),
    "lsq_plus": SchemeEntry([({}, (0, A * 7 / 8))]),
    "n2uq": SchemeEntry([({}, (0, A / 2))]),
    "dsq": SchemeEntry([({}, (0, A))]),
    "ewgs": SchemeEntry([({}, (2**-20 / 15, A))]),
    "minmax": SchemeEntry(
        [({}, (0, A)), ({"weight_bits": 2, "input_bits": 4, "symmetric": False}, (0, A))],
        [{}, {"weight_bits": 2, "input_bits": 4, "symmetric": False}],
    ),
    "percentile": SchemeEntry([({}, (0, A))], [{"weight_bits": 4, "input_bits": 4, "percentile": 99.0}]),
    "fp8": SchemeEntry([({}, (0, A))], [{"grad_format": "e5m2"}]),
}
