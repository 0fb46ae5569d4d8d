import math

import pytest
import torch
from torch import nn

import qconv
from qconv import schemes
from qconv.models import resnet18, resnet20, small_cnn
from qconv.summary import summary


def row_of(layer: nn.Module, input_size: tuple[int, ...]):
    (row,) = summary(nn.Sequential(layer), input_size).rows
    return row


@pytest.mark.parametrize(
    ("layer", "input_size", "output_shape", "macs"),
    [
        (nn.Conv1d(4, 6, 3, stride=2), (4, 9), (6, 4), 6 * 4 * 4 * 3),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 7), (6, 5, 7), 6 * 35 * 2 * 9),
        (nn.Conv3d(2, 3, 2), (2, 3, 3, 3), (3, 2, 2, 2), 3 * 8 * 2 * 8),
        (nn.ConvTranspose1d(4, 6, 3), (4, 5), (6, 7), 4 * 5 * 6 * 3),
        (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (4, 3, 3), (6, 6, 6), 4 * 9 * 3 * 4),
        (nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2), (2, 3, 3, 3), 8 * 2 * 8),
        (nn.Linear(5, 3), (5,), (3,), 15),
        (nn.Linear(5, 3), (7, 5), (7, 3), 7 * 15),
    ],
)
def test_multiply_accumulates(
    layer: nn.Module, input_size: tuple[int, ...], output_shape: tuple[int, ...], macs: int
) -> None:
    row = row_of(layer, input_size)
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    assert (row.output_shape, row.macs, row.parameters) == (output_shape, macs, parameters)
    assert (row.scheme, row.weight_bits, row.input_bits) == ("float", 32, 32)
    assert row.float_bytes == row.packed_bytes == 4 * parameters


@pytest.mark.parametrize(
    ("scheme", "weight_bits", "input_bits"),
    [(schemes.bnn(), 1, 1), (schemes.bwn(), 1, 32), (schemes.xnor(), 1, 1), (schemes.shift_q(weight_bits=4), 4, 32)],
    ids=str,
)
def test_packed_bytes(scheme: qconv.Scheme, weight_bits: int, input_bits: int) -> None:
    layer = qconv.QConv2d(3, 5, 3, scheme=scheme)  # 135 weights, 5 biases
    row = row_of(layer, (3, 8, 8))
    scales = layer.weight_codes().scale.numel()
    assert (row.scheme, row.weight_bits, row.input_bits) == (scheme.name, weight_bits, input_bits)
    assert row.float_bytes == 4 * 140
    assert row.packed_bytes == math.ceil(weight_bits * 135 / 8) + 4 * scales + 4 * 5


def test_learned_shifts_and_signs_are_the_packed_weight() -> None:
    row = row_of(qconv.QConv2d(3, 5, 3, bias=False, scheme=schemes.shift_ps(weight_bits=5)), (3, 8, 8))
    assert row.parameters == 135
    assert row.float_bytes == 4 * 135
    assert math.ceil(5 * 135 / 8) <= row.packed_bytes <= math.ceil(5 * 135 / 8) + 4 * 5


def test_identity_packs_nothing() -> None:
    row = row_of(qconv.QConv2d(3, 5, 3, scheme=schemes.identity()), (3, 8, 8))
    assert row.scheme == "identity()"
    assert row.packed_bytes == row.float_bytes


def test_totals_are_those_of_the_state_dict() -> None:
    for model in (resnet20(), small_cnn(3, 10)):
        stored = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        table = summary(model, (3, 32, 32))
        assert table.float_bytes == table.packed_bytes == stored
        assert table.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_multiply_accumulates() -> None:
    assert summary(resnet20(), (3, 32, 32)).macs == 40_551_040
    assert summary(resnet18(), (3, 32, 32)).macs == 555_422_720


def test_the_model_stays_as_it_is() -> None:
    model = qconv.convert(small_cnn(1, 10, width=32), schemes.bnn())
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    summary(model, (1, 8, 8))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_shared_weights_count_once_and_shared_calls_twice() -> None:
    conv = nn.Conv2d(2, 2, 1, bias=False)
    (row,) = summary(nn.Sequential(conv, conv), (2, 3, 3)).rows
    assert (row.parameters, row.macs) == (4, 2 * 4 * 9)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    table = summary(nn.Sequential(first, second), (4,))
    assert (table.parameters, table.macs) == (16, 32)


def test_the_table_shows_every_row_and_the_totals() -> None:
    lines = str(summary(qconv.convert(small_cnn(1, 10, width=32), schemes.bnn()), (1, 8, 8))).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any("blocks.1.conv" in line and "bnn()" in line and "1/1" in line and "589,824" in line for line in lines)
    assert lines[-1].startswith("total")
    assert "2,378,368" in lines[-1]


def test_bad_input_sizes_are_named() -> None:
    model = small_cnn(1, 10, width=32)
    with pytest.raises(ValueError, match=r"input_size \(=\(1, 0, 8\)\) must be one sample's shape"):
        summary(model, (1, 0, 8))
    with pytest.raises(ValueError, match=r"input_size \(=\(3, 8, 8\)\) must be what the model takes"):
        summary(model, (3, 8, 8))


class Halves(qconv.Quantizer):
    """Says how many bits it has, and defines no codes."""

    bits = 3

    def quantize(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return x.mul(2).round().clamp(-4, 3).div(2)


def test_a_quantizer_without_codes_counts_with_one_scale() -> None:
    layer = qconv.QConv2d(4, 8, 3, bias=False, scheme=qconv.Scheme("halves", weight=Halves))
    assert row_of(layer, (4, 5, 5)).packed_bytes == 3 * 8 * 4 * 9 // 8 + 4
