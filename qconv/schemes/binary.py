"""Schemes with binary weights."""

from functools import partial

from ..quantizers import ScaledSign, Sign, Straight
from .scheme import Scheme, written


def bnn(padding_value: int = 0) -> Scheme:
    """BNN, W1A1: signs without a scale (arXiv:1602.02830).

    The gradient of the input passes where ``|x| <= 1``, the weight's everywhere; latent weights are clamped to [-1, 1]
    after each optimizer step (`qconv.after_every_step`).
    """
    weight = partial(Sign, Straight, weight_clip=1.0)
    return Scheme(written("bnn", padding_value=(padding_value, 0)), Sign, weight, padding_value=padding_value)


def bwn(detach_scale: bool = False) -> Scheme:
    """BWN, W1A32: ``alpha_c · sign(w)`` with ``alpha_c = mean |w_c|`` (arXiv:1603.05279)."""
    return Scheme(written("bwn", detach_scale=(detach_scale, False)), weight=partial(ScaledSign, detach_scale))


def xnor(scale_map: bool = False, detach_scale: bool = False, padding_value: int = 0) -> Scheme:
    """XNOR-Net, W1A1: the weights of `bwn`, the sign of the input (arXiv:1603.05279).

    ``scale_map`` multiplies the output by K, the mean magnitude of the input under the kernel. The paper has it, the
    authors' code and the released model do not. The input's gradient passes where ``|x| <= 1``; in the authors' code
    the interval is open.
    """
    name = written(
        "xnor",
        scale_map=(scale_map, False),
        detach_scale=(detach_scale, False),
        padding_value=(padding_value, 0),
    )
    weight = partial(ScaledSign, detach_scale)
    return Scheme(name, Sign, weight, padding_value=padding_value, scale_map=scale_map)
