"""DoReFa-Net: weights, activations and gradients of few bits on fixed ranges (Zhou et al., arXiv:1606.06160)."""

from functools import partial

import torch
from torch import Tensor

from ..ground.checks import check_bits, check_flags
from ..quantizers.base import Levels, Quantizer, Whole, is_eager_cuda
from ..quantizers.kept_codes import Coded, Coding, Passing
from ..quantizers.numbers import ABOVE_ONE, BELOW_ZERO, wide, within
from ..quantizers.rounding import Rounding, level_step
from ..quantizers.signs import sign
from ..quantizers.stochastic import Stream
from ..scheme import Scheme, named, of_input


class DoReFaWeight(Coded):
    r"""Weights of DoReFa-Net.

    One bit: ``w_q = E · sign(w)`` with ``E = mean |w|`` over the whole layer and ``sign(±0) = +1``; ``dw = g``: E is a
    constant and nothing is masked.

    More bits: with ``t = tanh(w)``, ``m = max |t|`` over the whole layer and ``n = 2^b − 1``, ``w_q = 2/n · round(n ·
    (t / 2m + ½)) − 1``, half to even. There are 2^b levels from −1 to +1 in steps of 2/n, and 0 is not one of them: a
    weight of ±0 gives +1/n. The range is [−1, 1] whatever the weights are, with no rescaling. ``dw = g · (1 − t²) /
    m``, with no mask. ``detach_max=False`` also follows the gradient through m: each of the r weights with ``|t| = m``
    gets ``−(1 − t²) · sign(t) · Σ_j g_j t_j / (r m²)`` in addition.

    Larq treats m as a constant, as the default does here; tensorpack, by the authors (58.0 % of AlexNet with 8, 8 and 8
    bits), does not. Bitorch's gradient is g, without the factor ``(1 − t²) / m``. Latent weights are not clipped. The
    paper leaves the first and the last layer as they are.

    A layer of zeros gives zeros with one bit, +1/n and ``dw = g`` with more; a layer of one element, or of one
    magnitude, gives ``E · sign(w)`` or ±1. One NaN makes the whole layer NaN; with more bits ±inf gives ±1.

    Args:
        bits: 1 to 8.
        detach_max: treat m as a constant in the gradient.

    Raises:
        ValueError: ``bits`` out of range.
    """

    def __init__(self, bits: int = 1, detach_max: bool = True) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits)
        check_flags(detach_max=detach_max)
        self.detach_max = detach_max

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Odd whole numbers from −n to n, and the step 1 / n; with one bit the sign and E."""
        if self.bits == 1:
            return Whole(sign(x), _layer_mean(x))
        count = 2**self.bits - 1
        t = wide(x).tanh()
        _, divisor = _layer_max(t)
        values = ((t / (2 * divisor) + 0.5) * count).round_().mul_(2).sub_(count)
        return Whole(values, level_step(count, t))

    @property
    def coding(self) -> Coding:
        count = 2 ** int(self.bits)
        return Coding(count, low=1 - count, unit=2)

    def levels(self, *tensors: Tensor) -> Levels | None:
        if self.bits == 1:
            return None  # E depends on the weight
        count = 2**self.bits - 1
        return Levels(-int(count), int(count), torch.tensor(1 / count))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        if self.bits == 1:
            return (grad,)
        t = wide(x).tanh()
        maximum, divisor = _layer_max(t)
        grad_t = grad.to(t.dtype) / divisor
        if not self.detach_max:
            largest = t.abs() == maximum
            grad_max = -(grad_t * t).sum() / divisor
            grad_t = grad_t + t.sign() * largest * (grad_max / largest.sum())
        return ((grad_t * (1 - t.square())).to(x.dtype),)


class DoReFaInput(Passing):
    r"""Activations of DoReFa-Net: unsigned, in [0, 1].

    ``x_q = round(n · clamp(x, 0, 1)) / n`` with ``n = 2^b − 1``, half to even; one bit gives {0, 1}, not a sign.
    ``dx = g · 1[0 ≤ x ≤ 1]``: ties at 0 and at 1 pass. ±inf gives 1 or 0; NaN gives NaN; its gradient is 0 or g.

    The paper leaves the input of the first layer as it is, and clips the input of the last one without rounding it.

    Args:
        bits: 1 to 16.

    Raises:
        ValueError: ``bits`` out of range.
    """

    is_unsigned = True

    def __init__(self, bits: int = 2) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits, 1, 16)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Whole numbers from 0 to n, and the step 1 / n."""
        return self.rounding_of(x).whole(x)

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding:
        return Rounding(None, 0, 1, 2**self.bits - 1)

    def levels(self, *tensors: Tensor) -> Levels:
        count = 2**self.bits - 1
        return Levels(0, int(count), torch.tensor(1 / count), "nearest")

    @property
    def coding(self) -> Coding:
        return Coding(2 ** int(self.bits))

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return within(x, 0, 1)

    def passed(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        if not is_eager_cuda(x) or x.dtype == torch.float64:  # the ends are float32's
            return super().passed(grad, x)
        return torch.ops.aten.hardtanh_backward(grad, x, BELOW_ZERO, ABOVE_ONE)

    def stops_at(self, *tensors: Tensor) -> tuple[float, float]:
        return BELOW_ZERO, ABOVE_ONE


class DoReFaGradient(Quantizer):
    r"""Gradients of DoReFa-Net, rounded stochastically; the gradient quantizer of a `Scheme`.

    ``g_q = 2m · (round(clamp(n · (g / 2m + ½) + u, 0, n)) / n − ½)`` with ``n = 2^b − 1``, ``m = max |g|`` over each
    sample (dimension 0; a tensor of one dimension is one sample) and u uniform in [−½, ½): the 2^b levels go from −m to
    m, and the mean of ``g_q`` is g. A sample of zeros stays zero; in any other sample a zero becomes ±m/n, since 0 is
    not a level. A NaN or inf leaves no finite number in its sample, so that a gradient scaler sees it.

    u comes from a `Stream`: each process has its own numbers, and each optimizer step new ones. A layer only uses
    `quantize`; the gradient of this quantizer is the identity's.

    Args:
        bits: 1 to 8; the paper's AlexNet with one-bit weights and two-bit activations has 6.

    Raises:
        ValueError: ``bits`` out of range.
    """

    roles = ("grad",)

    def __init__(self, bits: int = 6) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits)
        self.stream = Stream(sharded=True)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.stream.tensors()

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None for _ in tensors)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        """Odd whole numbers from −n to n, and the step m / n of each sample."""
        key, step = tensors
        count = 2**self.bits - 1
        wide_x = wide(x)
        maximum = _sample_max(wide_x)
        divisor = torch.where(maximum == 0, 1.0, maximum)  # a NaN stays
        noise = self.stream.uniform(x, key, step).to(wide_x.dtype) - 0.5
        values = ((wide_x / (2 * divisor) + 0.5) * count + noise).clamp_(0, count).round_().mul_(2).sub_(count)
        return Whole(values, maximum / count)


def _layer_mean(weight: Tensor) -> Tensor:
    return weight.abs().mean() if weight.numel() else weight.new_zeros(())


def _layer_max(t: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude, and the divisor: 1 in place of a maximum too small to have a finite inverse."""
    if not t.numel():
        return t.new_zeros(()), t.new_ones(())
    maximum = t.abs().max()  # the exporter to ONNX has no amax without dimensions
    return maximum, torch.where(maximum < torch.finfo(t.dtype).tiny, 1.0, maximum)


def _sample_max(x: Tensor) -> Tensor:
    if x.ndim < 2:
        return x.abs().max() if x.numel() else x.new_zeros(())
    if not x[:1].numel():
        return x.new_zeros(x.shape[0], *[1] * (x.ndim - 1))
    return x.abs().amax(dim=tuple(range(1, x.ndim)), keepdim=True)


@named
def dorefa(
    weight_bits: int = 1, input_bits: int | None = 2, grad_bits: int | None = None, detach_max: bool = True
) -> Scheme:
    """DoReFa-Net: weights, inputs in [0, 1] and gradients of few bits (arXiv:1606.06160).

    ``input_bits=None`` leaves the input float, ``grad_bits=None`` the gradient. The paper leaves the first and the last
    layer float. ``detach_max=False`` follows the gradient through the largest weight, as tensorpack does.
    """
    check_bits("weight_bits", weight_bits)
    return Scheme(
        input=of_input(DoReFaInput, input_bits, high=16),
        weight=partial(DoReFaWeight, weight_bits, detach_max),
        grad=None if grad_bits is None else partial(DoReFaGradient, check_bits("grad_bits", grad_bits)),
    )
