from typing import cast

import pytest
import torch
from torch import nn

from qconv.models import resnet18, resnet20, small_cnn
from qconv.models.resnet import BasicBlock


def count(model: nn.Module) -> tuple[int, int]:
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return convolutions, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shortcut", ["normal", "per_conv"])
def test_resnets_have_the_published_size(shortcut: str) -> None:
    assert count(resnet20(shortcut=shortcut)) == (19, 269_722)
    assert count(resnet18(shortcut=shortcut)) == (20, 11_173_962)


def test_small_cnn_has_the_documented_size() -> None:
    assert count(small_cnn(1, 10, width=32)) == (4, 65_834)


@pytest.mark.parametrize("shortcut", ["normal", "per_conv"])
@pytest.mark.parametrize("size", [8, 9, 32])
def test_resnets_take_any_size(shortcut: str, size: int) -> None:
    model = resnet20(1, 7, shortcut=shortcut, activation=nn.Hardtanh).eval()
    assert model(torch.randn(2, 1, size, size)).shape == (2, 7)
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())


def test_resnet18_forward() -> None:
    assert resnet18(3, 5).eval()(torch.randn(1, 3, 16, 16)).shape == (1, 5)


def test_option_a_takes_every_second_pixel_and_adds_zero_channels() -> None:
    block = cast(BasicBlock, cast(nn.Sequential, resnet20().stages[1])[0])
    images = torch.randn(2, 16, 5, 5)
    shortcut = block.downsample(images)
    assert torch.equal(shortcut[:, 8:24], images[:, :, ::2, ::2])
    assert shortcut[:, :8].abs().sum() == 0
    assert shortcut[:, 24:].abs().sum() == 0


@pytest.mark.parametrize(("shortcut", "shortcuts"), [("normal", 1), ("per_conv", 2)])
def test_a_block_has_its_shortcuts(shortcut: str, shortcuts: int) -> None:
    model = resnet20(shortcut=shortcut, activation=nn.Identity).eval()
    block = cast(BasicBlock, cast(nn.Sequential, model.stages[0])[0])
    nn.init.zeros_(block.conv1.weight)
    nn.init.zeros_(block.conv2.weight)
    images = torch.randn(1, 16, 4, 4)
    # The convolutions add nothing: the block hands on its input, around both at once, or around one after the other.
    assert torch.equal(block(images), images)
    nn.init.ones_(block.bn1.bias)
    assert torch.equal(block(images), images + (shortcuts - 1))


@pytest.mark.parametrize("size", [8, 28, 32])
def test_small_cnn_hands_on_negative_values(size: int) -> None:
    model = small_cnn(3, 4, width=8)
    images = torch.randn(4, 3, size, size)
    assert model(images).shape == (4, 4)
    hidden = model.blocks[:2](images)
    assert 0.2 < (hidden < 0).float().mean() < 0.8


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"shortcut \(='both'\) must be one of 'normal', 'per_conv'"):
        resnet20(shortcut="both")
    with pytest.raises(ValueError, match=r"width \(=0\) must be at least 1"):
        small_cnn(1, 10, width=0)
