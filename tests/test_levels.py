"""Levels are stated once, by the quantizer: what it makes of any input is held to them."""

import pytest
import torch
from conftest import METHODS

from qconv import Scheme, schemes
from qconv.quantizers import Identity, Quantizer

SHAPE = (4, 3, 5, 5)


def quantizers_of(scheme: Scheme) -> list[Quantizer]:
    """The quantizers of input and weight, with learned tensors as after some training."""
    made = []
    for role in ("input", "weight"):
        quantizer: Quantizer = getattr(scheme, role)()
        quantizer.build(3, 1)
        quantizer.initialize(torch.randn(SHAPE))
        with torch.no_grad():
            for parameter in quantizer.parameters():
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
        made.append(quantizer.eval())
    return made


def check(quantizer: Quantizer) -> None:
    """Raise unless the quantizer keeps to the levels that it states, or has a reason to state none."""
    tensors = quantizer.tensors()
    x = torch.randn(SHAPE) * 2
    try:
        codes = quantizer.codes(x, *tensors)
    except TypeError:
        return  # it keeps real numbers
    levels = quantizer.levels(*tensors)
    if levels is None:
        other = quantizer.codes(x**5 * 16, *tensors)
        assert not torch.equal(codes.scale, other.scale) or codes.negative_scale is not None
        return
    low, high, scale, rounding, offset = levels
    assert torch.equal(codes.scale.double().flatten(), scale.double().flatten())
    assert (codes.offset is None) == (offset is None)
    assert codes.zero == 0
    assert codes.negative_scale is None
    if codes.offset is not None and offset is not None:
        assert torch.equal(codes.offset.double(), offset.double())
    far = torch.tensor([-1e7, 1e7, -3.0, 3.0]).repeat(75).view(SHAPE)
    for given in (x, far, far * 1e20, far * 1e-30, -far * 0):
        values = quantizer.codes(given, *tensors).values
        assert low <= int(values.min()) <= int(values.max()) <= high
    if "weight" not in quantizer.roles or "input" in quantizer.roles:  # weights are normalized, or clamped elsewhere
        values = quantizer.codes(far * 1e20, *tensors).values
        assert (int(values.min()), int(values.max())) == (low, high)
    if rounding == "nearest":
        step = scale.double().view(-1, *[1] * (3 if quantizer.roles == ("weight",) else 2))
        for k in range(low - 2, high + 2):
            for beside in (-0.499, 0.0, 0.499):
                given = ((k + beside) * step).float().expand(SHAPE)
                assert (quantizer.codes(given, *tensors).values == min(max(k, low), high)).all()
    if rounding == "sign":
        assert (low, high) == (-1, 1)
        given = torch.tensor([-1e30, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1e30]).view(2, 1, 2, 2).expand(2, 3, 2, 2)
        if quantizer.roles != ("weight",):
            assert torch.equal(quantizer.codes(given, *tensors).values.float(), torch.where(given < 0, -1.0, 1.0))


@pytest.mark.parametrize("name", METHODS)
def test_codes_keep_to_the_levels(name: str) -> None:
    for quantizer in quantizers_of(METHODS[name]):
        check(quantizer)


@pytest.mark.parametrize("name", METHODS)
def test_quantized_inputs_have_levels(name: str) -> None:
    """Integer inference is made from them."""
    quantizer, _ = quantizers_of(METHODS[name])
    stated = quantizer.levels(*quantizer.tensors())
    assert (stated is None) == (isinstance(quantizer, Identity) or name.startswith("fp8"))


def test_even_steps_are_told_from_others() -> None:
    for scheme, rounding in (
        (schemes.lsq(4, 4), "nearest"),
        (schemes.minmax(), "nearest"),
        (schemes.bnn(), "sign"),
        (schemes.reactnet(), "own"),
        (schemes.apot(), "own"),
        (schemes.n2uq(), "own"),
    ):
        quantizer, _ = quantizers_of(scheme)
        stated = quantizer.levels(*quantizer.tensors())
        assert stated is not None
        assert stated.rounding == rounding
