"""BWN and XNOR-Net: sign with the filter's mean magnitude as scale (Rastegari et al., arXiv:1603.05279)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ground.checks import check_flags, check_numbers
from ..quantizers.base import WEIGHT, Bounds, Whole
from ..quantizers.filters import filter_scale
from ..quantizers.numbers import wide
from ..quantizers.signs import Binary, sign
from ..quantizers.surrogates import HardClip, Make, Surrogate, chosen
from ..scheme import Scheme, named
from .bnn import Sign


def input_scale(
    input: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Return XNOR-Net's K: the mean magnitude of the input under each position of the kernel.

    ``K = mean_c |input| * box``, where the box filter holds ``1 / prod(kernel_size)``; padding counts as 0. One map
    for each group of channels.

    Args:
        input: ``(N, C_in, *spatial)``.
        kernel_size: the layer's kernel size.
        stride: the layer's stride.
        padding: the layer's padding, equal on both sides.
        dilation: the layer's dilation.
        groups: the layer's groups.

    Returns:
        ``(N, groups, *spatial_out)``.
    """
    grouped = input.abs().unflatten(1, (groups, -1)).mean(2)
    box = grouped.new_full((groups, 1, *kernel_size), 1 / torch.Size(kernel_size).numel())
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(kernel_size) - 1]
    return convolution(grouped, box, None, stride, padding, dilation, groups)


class ScaledSign(Binary):
    r"""Binary weights with one scale for each filter, the weight quantizer of BWN and XNOR-Net.

    ``w_q = alpha_c · sign(w)``, ``alpha_c = mean |w|`` over the n weights of filter c, ``sign(±0) = +1``. A filter of
    zeros gives zeros; a constant filter or one of a single element gives itself. A NaN or an inf makes its filter NaN
    or inf.

    ``dw = alpha_c · g · d(w) + sign(w)/n · Σ_j g_j sign(w_j)`` is, with the surrogate's ``d(w) = 1[|w| ≤ 1]``, the
    exact gradient of ``alpha · ste_sign(w)``; ``detach_scale=True`` drops the second term. ``paper_gradient=True`` is
    the paper's own formula, ``g · (1/n + alpha · d(w))``, which takes the sum over j only for g. In the authors' Torch
    code the interval is open; here ties at ±1 pass, because the clamped latent weights lie there.

    Alpha makes these gradients small: an update of Adam does not notice, one of SGD does, and few signs flip. So the
    authors' code multiplies them by ``1 − 1/C_in``, and under SGD by n: ``numel_gradient=True`` does both (with one
    input channel, n alone).

    After each optimizer step the authors' code first subtracts from each weight the mean over the input channels at its
    place in the kernel, and then clamps. ``center=True`` does so in `after_step_`, so the weights of the very first
    forward are as initialized. With one input channel (a depthwise convolution) nothing is subtracted: only zeros would
    be left. The released AlexNet's 43.3 % are from that code, centred; the paper's are 44.2 %. A re-implementation
    (44.87 %, and 99.23 % of LeNet-5 on MNIST) takes the exact gradient times ``(1 − 1/C_in) · n``.

    Args:
        detach_scale: treat alpha as a constant in the gradient.
        weight_clip: latent weights are clamped to ``[-weight_clip, weight_clip]`` after each optimizer step, as in the
            authors' code; None leaves them.
        surrogate: makes the surrogate derivative of the sign.
        center: centre the latent weights after each optimizer step.
        paper_gradient: the paper's formula in place of the exact one.
        numel_gradient: multiply by ``n · (1 − 1/C_in)``, as the authors' code does under SGD.

    Raises:
        ValueError: ``weight_clip`` is not positive, or ``detach_scale`` together with ``paper_gradient``.
    """

    def __init__(
        self,
        detach_scale: bool = False,
        weight_clip: float | None = 1.0,
        surrogate: Callable[[], Surrogate] = HardClip,
        center: bool = False,
        paper_gradient: bool = False,
        numel_gradient: bool = False,
    ) -> None:
        super().__init__(surrogate)
        check_numbers(weight_clip=weight_clip)
        check_flags(
            detach_scale=detach_scale, center=center, paper_gradient=paper_gradient, numel_gradient=numel_gradient
        )
        if weight_clip is not None and not weight_clip > 0:
            raise ValueError(f"weight_clip (={weight_clip}) must be positive or None")
        if detach_scale and paper_gradient:
            raise ValueError(
                "detach_scale (=True) and paper_gradient (=True) are two forms of one gradient: choose one"
            )
        self.detach_scale = detach_scale
        self.weight_clip = weight_clip
        self.center = center
        self.paper_gradient = paper_gradient
        self.numel_gradient = numel_gradient

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(x), filter_scale(x))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return self._backward(wide(grad), wide(x), *tensors).to(x.dtype), *(None for _ in tensors)

    def _backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        scale = filter_scale(x)
        count = max(x[:1].numel(), 1)
        if self.numel_gradient:  # scale the factors that are linear in the gradient
            channels = x.shape[1] if x.ndim > 1 else 1
            grad = grad * (count * (1 - 1 / channels) if channels > 1 else count)
        if self.detach_scale:
            return self.surrogate.backward(grad, x, *tensors) * scale
        if self.paper_gradient:  # the surrogate may overwrite `grad`, so everything else that reads it comes first
            of_scale = grad / count
            return self.surrogate.backward(grad, x, *tensors) * scale + of_scale
        signs = sign(x)
        grad_scale = (grad * signs).sum(dim=tuple(range(1, x.ndim)), keepdim=True)
        grad_sign = self.surrogate.backward(grad, x, *tensors) * scale
        return torch.addcmul(grad_sign, signs, grad_scale / count)

    @property
    def bounds(self) -> Bounds:
        return {} if self.weight_clip is None else {WEIGHT: (-self.weight_clip, self.weight_clip)}

    def after_step_(self, x: Tensor | None) -> None:
        if self.center and x is not None and x.ndim > 1 and x.shape[1] > 1:
            x.sub_(x.mean(1, keepdim=True))
        super().after_step_(x)


@named
def bwn(
    detach_scale: bool = False,
    *,
    center: bool = False,
    paper_gradient: bool = False,
    numel_gradient: bool = False,
    surrogate: Make | None = None,
) -> Scheme:
    """BWN, W1A32: ``alpha_c · sign(w)`` with ``alpha_c = mean |w_c|`` (arXiv:1603.05279).

    The input is float, so ``surrogate`` is for the weight. The other arguments are as in
    `qconv.quantizers.ScaledSign`.

    Raises:
        ValueError: ``detach_scale`` together with ``paper_gradient``.
        TypeError: ``surrogate`` makes no surrogate.
    """
    options = dict(center=center, paper_gradient=paper_gradient, numel_gradient=numel_gradient)
    return Scheme(weight=partial(ScaledSign, detach_scale, surrogate=chosen(surrogate, HardClip), **options))


@named
def xnor(
    scale_map: bool = False,
    detach_scale: bool = False,
    padding_value: int = 0,
    *,
    center: bool = False,
    paper_gradient: bool = False,
    numel_gradient: bool = False,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """XNOR-Net, W1A1: the weights of `bwn` and the sign of the input (arXiv:1603.05279).

    ``scale_map`` multiplies the output by K, the mean magnitude of the input under the kernel. The paper does so, the
    authors' code and the released model do not. K is differentiated, too. The gradient of the input's sign passes where
    ``|x| <= 1``; in the authors' code the interval is open. ``center``, ``paper_gradient`` and ``numel_gradient`` are
    those of `qconv.quantizers.ScaledSign`.

    Raises:
        ValueError: ``detach_scale`` together with ``paper_gradient``.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    options = dict(center=center, paper_gradient=paper_gradient, numel_gradient=numel_gradient)
    return Scheme(
        input=partial(Sign, chosen(surrogate, HardClip)),
        weight=partial(ScaledSign, detach_scale, surrogate=chosen(weight_surrogate, HardClip), **options),
        padding_value=padding_value,
        scale_map=scale_map,
    )
