"""Rules for the rounding error of one operation's result.

All errors are upper estimates of the standard deviation, in units of `UNIT`, the largest relative rounding error of
float32; the squares of independent errors are added.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

UNIT = 2.0**-24
COARSE = 64 * UNIT  # of the largest number: the total error of an operation whose parts are hidden
PERTURBED = 4  # number of perturbed runs of an unknown operation

# The error follows the number: through copies, and through the larger of several.
_MOVES = frozenset(
    (
        *("_unsafe_view", "clone", "contiguous", "copy", "_to_copy", "lift_fresh", "cat", "stack", "index", "gather"),
        *("index_select", "index_put", "slice_scatter", "select_scatter", "repeat", "flip", "roll", "im2col", "amax"),
        *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d"),
        *("replication_pad2d", "replication_pad3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
        *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "adaptive_max_pool2d"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    )
)
_POOLS = frozenset(("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"))
_SUMS = frozenset(("mean", "sum", *_POOLS, "upsample_bilinear2d", "_upsample_bilinear2d_aa"))
_ELEMENTWISE = frozenset(("hardswish", "hardsigmoid", "_prelu_kernel"))  # besides those that torch calls pointwise
_SELECTIONS = frozenset(("maximum", "minimum", "where", "masked_fill", "detach"))
_CHOICES = frozenset(("relu", "hardtanh", "clamp", "clamp_min", "clamp_max", "neg", "abs", *_SELECTIONS))
# The positions of the factors and of the summand, for convolutions and matrix products.
_PRODUCTS: dict[str, tuple[int, int, int | None]] = {
    "convolution": (0, 1, 2),
    "linear": (0, 1, 2),
    "addmm": (1, 2, 0),
    "baddbmm": (1, 2, 0),
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), (0, 1, None)),
}
_NORMS = {"native_batch_norm": 7, "_native_batch_norm_legit_no_training": 6}  # the position of eps

Found = tuple[Sequence[Tensor], Sequence[Tensor]]


def product_error(value: Tensor, squares: Tensor, terms: int) -> Tensor:
    r"""The error of a sum of K products: ``2^-24 · √(K (value² + squares))``, ``squares`` the sum of their squares.

    Added in any order that does not depend on them, the partial sum of k products has the variance of a random walk
    from 0 to ``value``, on average ``value²/3 + squares/6``, and each of the K sums is rounded by a third of `UNIT`
    (as a variance) of it.
    """
    return UNIT * (terms * (value.square() + squares.abs()) + value.square()).sqrt()


def _in_float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


class AtenCall:
    """An operation of aten with its arguments as leaves of a tree; ``known`` has their exact values and errors.

    ``summed`` is the number of products in each number of its first argument, if that is of a convolution; `terms` is
    that of its result, once it is `rounded`.
    """

    def __init__(
        self,
        func: Any,
        leaves: Sequence[Any],
        spec: TreeSpec,
        known: Mapping[int, tuple[Tensor, Tensor]],
        summed: int = 0,
    ) -> None:
        self.func, self.name = _functional(func)
        self.spec = spec
        self.leaves: list[Any] = [torch.float64 if _is_float(leaf) else leaf for leaf in leaves]
        if self.name in _CHOICES or self.name in _MOVES:  # their numbers are results, which are float32
            self.leaves = [_in_float32(leaf) if isinstance(leaf, float) else leaf for leaf in self.leaves]
        self.exact = {index: exact for index, (exact, _) in known.items()}
        self.errors = {index: error for index, (_, error) in known.items()}
        self.moving = [index for index, error in self.errors.items() if bool(error.any())]
        self.summed, self.terms = summed, 0

    def rounded(self, outputs: Sequence[Tensor]) -> Found:
        """Exact values and errors of the ``outputs`` of float32."""
        if not self.exact:
            return [leaf.double() for leaf in outputs], [
                torch.zeros_like(leaf, dtype=torch.float64) for leaf in outputs
            ]
        if self.func is None:
            return self._coarse(outputs)
        try:
            exact = self._run(self.exact)
            return exact, [_clean(error) for error in self._rule()(exact)]
        except (RuntimeError, TypeError, NotImplementedError):  # it does not support float64
            return self._coarse(outputs)

    def _rule(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        if self.func.is_view or self.name in _MOVES:
            return self._moved
        if torch.Tag.pointwise in self.func.tags or self.name in _ELEMENTWISE:
            return self._elementwise
        if self.name in _PRODUCTS and self._is_plain():
            return self._product
        if self.name in _SUMS:
            return self._sum
        if self.name in _NORMS and self.leaves[5] is not True and self.exact.keys() >= {3, 4}:
            return self._norm
        return self._perturbed

    def _run(self, values: Mapping[int, Tensor | None]) -> list[Tensor]:
        leaves = [values.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return [leaf for leaf in tree_leaves(self.func(*args, **kwargs)) if isinstance(leaf, Tensor)]

    def _is_plain(self) -> bool:
        """Whether there are no factors ``alpha`` and ``beta``."""
        return not tree_unflatten(list(self.leaves), self.spec)[1]

    def _moved(self, exact: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.name == "constant_pad_nd" and len(self.leaves) % 2 == 0:
            self.leaves[-1] = 0  # the value is exact
        return self._run(self.errors)

    def _elementwise(self, exact: Sequence[Tensor]) -> Sequence[Tensor]:
        (value,) = exact
        variance = torch.zeros_like(value)
        for index in self.moving:
            sides = (
                self._run({**self.exact, index: self.exact[index] + sign * self.errors[index]})[0] for sign in (1, -1)
            )
            variance += torch.maximum(*((side - value).abs() for side in sides)).square()
        if self.name not in _CHOICES:
            is_simple = self.name in ("add", "sub", "mul", "div")
            variance += ((1 if is_simple else 4) * UNIT * value).square()
            if not is_simple:
                for operand in self.exact.values():
                    variance += (UNIT * operand).square()  # inner parts that cancel, as in x · relu6(x + 3) / 6
        return [variance.sqrt()]

    def _product(self, exact: Sequence[Tensor]) -> Sequence[Tensor]:
        (value,) = exact
        first, second, summand = _PRODUCTS[self.name]
        squares = {index: operand.square() for index, operand in self.exact.items()}
        channels = value.shape[1] if self.name == "convolution" else 0
        self.terms = self.exact[second].numel() // max(channels, 1) if channels else self.exact[first].shape[-1]
        variance = product_error(value, self._run(squares)[0], self.terms).square()
        for factor in (first, second):
            if factor in self.moving:
                bare: dict[int, Tensor | None] = {**squares, factor: self.errors[factor].square()}
                if summand is not None and summand in self.exact:
                    bare[summand] = torch.zeros_like(self.exact[summand])
                variance += self._run(bare)[0].abs()
        if summand in self.moving:
            variance += self.errors[summand].square()
        return [variance.sqrt()]

    def _sum(self, exact: Sequence[Tensor]) -> Sequence[Tensor]:
        (value,) = exact
        terms = max(self.exact[0].numel() // max(value.numel(), 1), 1)
        magnitude = self._run({**self.exact, 0: self.exact[0].abs()})[0]
        return [self._run(self.errors)[0].abs() + UNIT * math.sqrt(terms) * magnitude]

    def _norm(self, exact: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rule for batch norm with stored statistics, also as a scale and a bias.

        The sums of a convolution may then begin with the bias, and each is rounded at its size.
        """
        mean, var = self.exact[3], self.exact[4]
        weight, bias = self.exact.get(1, torch.ones_like(mean)), self.exact.get(2, torch.zeros_like(mean))
        signed = weight * (var + self.leaves[_NORMS[self.name]]).rsqrt()
        shape = [1, -1, *[1] * (exact[0].ndim - 2)]
        signed, bias, mean = (tensor.view(shape) for tensor in (signed, bias, mean))
        slope = signed.abs()
        terms = 2 * slope * (self.exact[0].abs() + mean.abs()) + bias.abs() + exact[0].abs()
        error = (self.errors[0] * slope).square() + (UNIT * terms).square()
        error = error + self.summed * (UNIT * (bias - signed * mean)).square()
        return [error.sqrt(), *(torch.zeros_like(operand) for operand in exact[1:])]

    def _perturbed(self, exact: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rule for an unknown operation: move its inputs in random directions and watch its outputs."""
        generator = torch.Generator().manual_seed(0)
        variances = [torch.zeros_like(operand, dtype=torch.float64) for operand in exact]
        for _ in range(PERTURBED):
            moved: dict[int, Tensor] = {}
            for index, value in self.exact.items():
                signs = torch.randint(0, 2, value.shape, generator=generator, device="cpu").to(value) * 2 - 1
                moved[index] = value + signs * (self.errors[index] + 2 * UNIT * value.abs())
            for variance, value, other in zip(variances, exact, self._run(moved), strict=True):
                variance += (other - value).square() / PERTURBED
        return [
            3 * variance.sqrt() + 8 * UNIT * _largest(value) for variance, value in zip(variances, exact, strict=True)
        ]

    def _coarse(self, outputs: Sequence[Tensor]) -> Found:
        parts = [float(self.errors[index].max()) / (_largest(self.exact[index]) + 1e-37) for index in self.moving]
        exact = [leaf.double() for leaf in outputs]
        part = COARSE + sum(parts)
        return exact, [torch.full_like(operand, part * _largest(operand)) for operand in exact]


def _functional(func: Any) -> tuple[Any, str]:
    """Return the variant of an operation that does not write into an argument (None without a name), and its name."""
    name = func._schema.name.rpartition("::")[2]
    if not func._schema.is_mutable or name == "native_batch_norm":
        return func, name
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, func._overloadname, None), name.removesuffix("_")


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.dtype) and leaf.is_floating_point


def _largest(value: Tensor) -> float:
    finite = value.abs().nan_to_num(0, 0, 0) if value.is_floating_point() else value.abs()
    return float(finite.max()) if value.numel() else 0.0


def _clean(error: Tensor) -> Tensor:
    """Set the error to 0 next to NaN and inf."""
    return error.nan_to_num(0, 0, 0) if error.is_floating_point() else error
