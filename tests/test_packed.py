"""Packed files: bits and trits, the same outputs bit for bit, the size that the summary says, and wrong files."""

import json
import math
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import METHODS
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import l1_unstructured

import qconv
from qconv import schemes
from qconv.models import resnet20, small_cnn
from qconv.packed import packed_sizes, read_header
from qconv.packed.calls import build_network, build_quantizer, quantizer_call
from qconv.packed.header import Header, checksum
from qconv.packed.radix import pack, packed_length, radix_of, unpack

RESNET = {"_target_": "qconv.models.resnet20", "num_classes": 4}


# --- Bits


@pytest.mark.parametrize("radix", [2, 3, 4, 8, 16, 32, 64, 256, 65536])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 17, 1000])
def test_numbers_come_back(radix: int, count: int) -> None:
    numbers = torch.randint(radix, (count,))
    data = pack(numbers, radix)
    assert data.dtype == torch.uint8
    assert len(data) == packed_length(count, radix)
    assert unpack(data, count, radix).tolist() == numbers.tolist()


def test_more_numbers_than_are_unfolded_at_once() -> None:
    for radix in (2, 3, 8):
        numbers = torch.randint(radix, (2_000_003,), dtype=torch.int8)
        assert torch.equal(unpack(pack(numbers, radix), len(numbers), radix), numbers.int())


def test_the_layout_of_the_bytes() -> None:
    assert pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 1]), 2).tolist() == [0b1000_0001, 1]
    assert pack(torch.tensor([5, 6, 7]), 8).tolist() == [0b11_110_101, 0b1]
    assert pack(torch.tensor([1, 2, 0, 0, 2, 1]), 3).tolist() == [1 + 2 * 3 + 2 * 81, 1]
    assert packed_length(1000, 3) == 200
    assert packed_length(1000, 4) == 250


BYTES = partial(torch.tensor, dtype=torch.uint8)
WRONG_BYTES: list[tuple[Callable[[], object], str]] = [
    (lambda: unpack(BYTES([0, 0, 0]), 9, 2), "9 numbers of radix 2 must be 2 bytes"),
    (lambda: unpack(torch.zeros(2, dtype=torch.int8), 9, 2), r"2 bytes, not .* of torch.int8"),
    *((partial(unpack, BYTES([0, last]), 9, 2), "after the last number must be 0") for last in (2, 128)),
    (lambda: unpack(BYTES([0, 3]), 6, 3), "after the last number must be 0"),
    (lambda: unpack(BYTES([0, 0b1000_0000]), 5, 8), "after the last number must be 0"),  # 15 of 16 bits
    (lambda: unpack(BYTES([250]), 5, 3), "below 243, not 250"),
    (lambda: pack(torch.tensor([3]), 3), "numbers must be from 0 to 2"),
    *((partial(pack, torch.tensor([0]), n), rf"radix \(={n}\) must be 3 or a power of two") for n in (0, 1, 5, 2**17)),
]


@pytest.mark.parametrize(("call", "message"), WRONG_BYTES)
def test_bytes_that_are_wrong(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_radix() -> None:
    assert [radix_of(bits, 2) for bits in (1, math.log2(3), 2, 5)] == [2, 3, 4, 32]
    assert radix_of(math.log2(3), 4) == 4
    assert radix_of(2, 9) == 16


# --- Files


def network() -> nn.Module:
    """A layer of each kind that takes images: plain, grouped, transposed, linear; with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, stride=2, groups=2), nn.PReLU(6)),
        *(nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), nn.Flatten(), nn.Linear(144, 5)),
    )


def trained(scheme: qconv.Scheme, model: nn.Module | None = None, pictures: Tensor | None = None) -> nn.Module:
    """The model after a step, at the end of its schedule."""
    model = network() if model is None else model
    pictures = torch.randn(4, 3, 8, 8) if pictures is None else pictures
    skip = ("4",) if scheme.scale_map else ()
    qconv.convert(model, scheme, skip=skip)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress in (0.0, 1.0):
        qconv.set_progress(model, progress)
        model(pictures).square().mean().backward()
        optimizer.step()
        qconv.after_step(model)
    return model.eval()


def quantized(model: nn.Module) -> list[qconv.QuantizedLayer]:
    return [layer for layer in model.modules() if isinstance(layer, qconv.QuantizedLayer)]


def test_every_method_comes_back_bit_for_bit(method: qconv.Scheme, tmp_path: Path) -> None:
    model, pictures = trained(method), torch.randn(5, 3, 8, 8)
    path = tmp_path / "model.safetensors"
    qconv.save_packed(model, path)
    loaded = qconv.load_packed(path, network())
    assert not loaded.training
    assert torch.equal(loaded(pictures), model(pictures))
    sizes, header = packed_sizes(model)
    assert sum(sizes.values()) + header - path.stat().st_size in (0, 8)  # a test of outputs with fewer digits
    again = tmp_path / "again.safetensors"
    qconv.save_packed(loaded, again)
    first, second = (read_header(each).model_copy(update={"trial": None, "sha256": ""}) for each in (path, again))
    assert first == second
    stored, kept = (load_file(each) for each in (path, again))
    assert all(kept.pop(name).equal(tensor) for name, tensor in stored.items())
    assert not kept
    for layer, original in zip(quantized(loaded), quantized(model), strict=True):
        assert layer.scheme.name == original.scheme.name
        assert torch.equal(layer.quantized_weight(), original.quantized_weight())
        assert torch.equal(layer.weight, original.quantized_weight())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    for scheme in (schemes.bwn(), schemes.twn(), schemes.lsq(), schemes.shift_q()):
        model = trained(scheme).to(dtype)
        qconv.save_packed(model, tmp_path / "model")
        pictures = torch.randn(2, 3, 8, 8, dtype=dtype)
        assert torch.equal(qconv.load_packed(tmp_path / "model", network())(pictures), model(pictures))


@pytest.mark.parametrize("layer", ["QDeformConv2d", "QDeformConv2dPack"])
def test_deformable_layers(layer: str, tmp_path: Path) -> None:
    kind = getattr(qconv, layer)
    made = kind(4, 6, 3, padding=1, groups=2, scheme=schemes.twn()).eval()
    qconv.save_packed(made, tmp_path / "model")
    loaded = qconv.load_packed(tmp_path / "model", kind.float_type(4, 6, 3, padding=1, groups=2))
    extra = () if layer.endswith("Pack") else (torch.randn(2, 18, 5, 5),)
    input = torch.randn(2, 4, 5, 5)
    assert torch.equal(loaded(input, *extra), made(input, *extra))


@pytest.mark.parametrize("padding_value", [1, -1])
def test_padding_comes_back(padding_value: int, tmp_path: Path) -> None:
    layer = qconv.QConv2d(3, 4, 3, padding=1, scheme=schemes.bnn(), padding_value=padding_value).eval()
    qconv.save_packed(layer, tmp_path / "model")
    loaded: Any = qconv.load_packed(tmp_path / "model", nn.Conv2d(3, 4, 3, padding=1))
    input = torch.randn(2, 3, 5, 5)
    assert torch.equal(loaded(input), layer(input))


def test_a_network_needs_nothing_but_its_file(tmp_path: Path) -> None:
    pictures = torch.randn(2, 3, 32, 32)
    bireal = {"shortcut": "per_conv", "activation": {"_target_": "torch.nn.Hardtanh", "_partial_": True}}
    node = {**RESNET, **bireal}
    model = trained(schemes.bireal(), build_network(node), pictures)
    names = ["cat", "dog", "ship", "Flugzeug ✈"]
    path = tmp_path / "model.safetensors"
    normal = {"size": [3, 32, 32], "mean": [125.0, 123.0, 114.0], "std": [63.0, 62.5, 66.0]}
    qconv.save_packed(model, path, network=node, pictures=normal, classes=names)
    before = torch.get_rng_state()
    loaded = qconv.load_packed(path)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(loaded(pictures), model(pictures))
    found = read_header(path)
    assert found.classes == names
    assert found.pictures is not None
    assert found.pictures.std == [63.0, 62.5, 66.0]
    said = qconv.summarize(model, (3, 32, 32)).packed_bytes
    assert abs(path.stat().st_size - said) <= 0.02 * said


def test_a_model_is_filled_in_place_and_where_it_is(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
            self.again = self.conv
            self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])
            self.norms[1].weight = self.norms[0].weight
            self.register_buffer("mask", torch.arange(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.norms[1](self.again(self.norms[0](self.conv(x))))

    model = trained(schemes.xnor(), Twice())
    qconv.save_packed(model, tmp_path / "model")
    other = Twice()
    loaded: Any = qconv.load_packed(tmp_path / "model", other)
    assert loaded is other
    assert loaded.conv is loaded.again
    assert loaded.norms[0].weight is loaded.norms[1].weight
    pictures = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(pictures), model(pictures))
    assert read_header(tmp_path / "model").shared == {"norms.1.weight": "norms.0.weight"}


def test_a_loaded_model_goes_back_to_float_and_is_not_trained(tmp_path: Path) -> None:
    model = trained(schemes.dorefa(4, 4))
    qconv.save_packed(model, tmp_path / "model")
    loaded = qconv.load_packed(tmp_path / "model", network())
    assert not any(layer.weight.requires_grad for layer in quantized(loaded))
    weights = [layer.quantized_weight() for layer in quantized(model)]
    names = [name for name, layer in loaded.named_modules() if isinstance(layer, qconv.QuantizedLayer)]
    plain = qconv.to_float(loaded)
    for name, weight in zip(names, weights, strict=True):
        assert torch.equal(plain.get_submodule(name).weight, weight)  # pyright: ignore[reportArgumentType]


def test_training_mode_changes_nothing(tmp_path: Path) -> None:
    for scheme in (schemes.shift_q(4, rounding="stochastic"), schemes.shift_ps(4, rounding="stochastic")):
        model, pictures = trained(scheme), torch.randn(2, 3, 8, 8)
        expected = model(pictures)
        qconv.save_packed(model.train(), tmp_path / "model")
        assert torch.equal(qconv.load_packed(tmp_path / "model", network())(pictures), expected)


@pytest.mark.parametrize("bits", [6, 7, 8])
def test_powers_beyond_the_integers(bits: int, tmp_path: Path) -> None:
    for scheme in (schemes.shift_q(bits), schemes.shift_ps(bits)):
        model, pictures = trained(scheme), torch.randn(2, 3, 8, 8)
        assert qconv.summarize(model, (3, 8, 8)).packed_bytes > 0
        qconv.save_packed(model, tmp_path / "model")
        loaded = qconv.load_packed(tmp_path / "model", network())
        assert torch.equal(loaded(pictures), model(pictures))
        assert loaded.half()(pictures.half()).isfinite().all()


def test_compiled_models_and_parallel_ones(tmp_path: Path) -> None:
    model, pictures = trained(schemes.bwn()), torch.randn(2, 3, 8, 8)
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        qconv.save_packed(wrapped, tmp_path / "model")  # pyright: ignore[reportArgumentType]
        assert torch.equal(qconv.load_packed(tmp_path / "model", network())(pictures), model(pictures))


def test_the_layout_in_memory_and_other_buffers_stay(tmp_path: Path) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.up = nn.ConvTranspose2d(4, 2, 2)
            self.register_buffer("my_num_batches_tracked", torch.tensor(7))
            self.register_buffer("phase", torch.ones(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.conv(x)) * self.my_num_batches_tracked * self.phase

    model: Any = qconv.convert(Counts(), schemes.twn(), skip=()).eval()
    model.my_num_batches_tracked.fill_(3)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        qconv.save_packed(model, tmp_path / "model")
        blank: Any = Counts()
        loaded: Any = qconv.load_packed(tmp_path / "model", blank.to(memory_format=torch.channels_last))
        pictures = torch.randn(2, 3, 8, 8, dtype=dtype)
        torch.testing.assert_close(loaded(pictures), model(pictures))
        assert loaded.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert qconv.to_float(loaded) is loaded
        assert loaded.up.weight.is_contiguous(memory_format=torch.channels_last)


def test_quantizers_outside_of_layers(tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), qconv.quantizers.PACT(4), qconv.quantizers.LSQInput(4))

    model: Any = made()
    with pytest.raises(ValueError, match=r"a quantizer outside of a layer: LSQInput.* waits"):
        qconv.save_packed(model, tmp_path / "model")
    model[1].alpha.data.fill_(3.0)
    model[2].initialize(torch.rand(8))
    model[2].calibrated = True
    qconv.save_packed(model.eval(), tmp_path / "model")
    pictures = torch.randn(2, 3, 8, 8)
    assert torch.equal(qconv.load_packed(tmp_path / "model", made())(pictures), model(pictures))


def test_fixed_weights_take_no_others(tmp_path: Path) -> None:
    model = trained(schemes.bwn())
    qconv.save_packed(model, tmp_path / "model")
    loaded = qconv.load_packed(tmp_path / "model", network())
    with pytest.raises(ValueError, match="the weights of a packed model are fixed"):
        loaded.load_state_dict(network().state_dict(), strict=False)
    other = qconv.load_packed(tmp_path / "model", network())
    other.load_state_dict(loaded.state_dict())


# --- What can't be saved


def test_what_would_not_be_what_ships(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(ValueError, match=r"layer '0' \(QConv2d, lsq.*: LSQInput.* waits for data: train it, or"):
        qconv.save_packed(qconv.convert(network(), schemes.lsq(), skip=()), path)
    with pytest.raises(ValueError, match=r"layer '0' \(QConv2d, two_stage.* is not in its last stage yet"):
        qconv.save_packed(qconv.convert(network(), schemes.two_stage(schemes.bnn()), skip=()), path)
    with pytest.raises(ValueError, match=r"layer '0' \(QConv2d, inq.* is not in its last stage yet"):
        qconv.save_packed(qconv.convert(network(), schemes.inq(), skip=()), path)
    first: Any = trained(schemes.bwn())
    first[1].running_var[0] = math.nan
    with pytest.raises(ValueError, match=r"'1.running_var' has NaN or inf"):
        qconv.save_packed(first, path)
    model: Any = trained(schemes.bwn())
    model[0].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"layer '0' \(QConv2d, bwn\(\)\): its weight has NaN or inf"):
        qconv.save_packed(model, path)
    model = trained(schemes.lsq())
    model[0].input_quantizer.step.data.neg_()
    with pytest.raises(ValueError, match=r"0.input_quantizer.step \(=-.*\) must be positive and finite"):
        qconv.save_packed(model, path)
    assert not path.exists()


class Own(qconv.quantizers.DoReFaInput):
    pass


class Doubled(qconv.QConv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Wrong(qconv.quantizers.MinMaxWeight):
    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return 2 * super().quantize(x, *tensors)


def test_what_would_come_back_as_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(ValueError, match=r"Doubled\(.*\): type \(=Doubled\) must be one of QConv1d"):
        qconv.save_packed(Doubled(3, 4, 3), path)
    assert qconv.summarize(Doubled(3, 4, 3), (3, 8, 8)).packed_bytes > 0
    with pytest.raises(ValueError, match=r"the codes of its Wrong.* must give its quantized weight"):
        qconv.save_packed(qconv.QConv2d(3, 4, 3, scheme=qconv.Scheme("wrong", weight=Wrong)), path)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    qconv.convert(tied, schemes.twn(), skip=("1",))
    with pytest.raises(ValueError, match=r"'1.weight' is also the latent weight of the quantized layer '0.weight'"):
        qconv.save_packed(tied, path)
    pruned = qconv.QConv2d(3, 4, 3)
    l1_unstructured(pruned, "weight", 0.5)
    with pytest.raises(
        ValueError, match=r"computed \(pruning\): call torch.nn.utils.prune.remove\(layer, 'weight'\) first"
    ):
        qconv.save_packed(pruned, path)
    biased = parametrize.register_parametrization(qconv.QConv2d(3, 4, 3), "bias", nn.Identity())
    with pytest.raises(
        ValueError, match=r"its bias is computed: call .*remove_parametrizations\(layer, 'bias'\) first"
    ):
        qconv.save_packed(biased, path)
    with pytest.raises(TypeError, match=r"model \(={}\) must be a torch.nn.Module"):
        qconv.save_packed({}, path)  # pyright: ignore[reportArgumentType]
    assert not path.exists()


def test_a_network_that_is_not_the_models(tmp_path: Path) -> None:
    model = trained(schemes.bnn(), resnet20(num_classes=4), torch.randn(2, 3, 32, 32))
    for other in (
        {"_target_": "qconv.models.resnet32", "num_classes": 4},
        {**RESNET, "activation": {"_target_": "torch.nn.Hardtanh", "_partial_": True}},
        {**RESNET, "num_classes": 5},
    ):
        with pytest.raises(ValueError, match=r"network \(=.*\) must be the model's: "):
            qconv.save_packed(model, tmp_path / "model", network=other)
    with pytest.raises(ValueError, match="must be plain values"):
        qconv.save_packed(model, tmp_path / "model", network={**RESNET, "activation": nn.ReLU})
    reactnet = {
        "_target_": "qconv.models.resnet20",
        "activation": {"_target_": "qconv.models.RPReLU", "_partial_": True},
    }
    model = trained(schemes.reactnet(), build_network(reactnet), torch.randn(2, 3, 32, 32))
    qconv.save_packed(model, tmp_path / "model", network=reactnet)
    pictures = torch.randn(2, 3, 32, 32)
    assert torch.equal(qconv.load_packed(tmp_path / "model")(pictures), model(pictures))


def test_a_summary_does_not_need_what_can_be_packed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, np.int64(4), 3)  # pyright: ignore[reportArgumentType]
            self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))

        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    model = qconv.convert(Odd(), schemes.bwn(), skip=())
    assert qconv.summarize(model, (3, 8, 8)).packed_bytes > 0
    with pytest.raises(ValueError, match=r"'_extra_state' \(=dict\) must be a tensor"):
        qconv.save_packed(model, "none")


def test_a_quantizer_of_ones_own(tmp_path: Path) -> None:
    model = trained(qconv.Scheme("own", input=Own))
    with pytest.raises(
        ValueError, match=r"layer '0' \(QConv2d, own\): Own is not one of qconv's quantizers: it can't be packed"
    ):
        qconv.save_packed(model, tmp_path / "model")
    assert qconv.summarize(model, (3, 8, 8)).packed_bytes > 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"network": {"_target_": "os.system", "command": "true"}}, r"_target_ \(='os.system'\) must be one of"),
        ({"network": {"_target_": "qconv.models.resnet20", "depth": 3}}, "resnet20 can't be made of"),
        ({"network": {"_target_": "qconv.models.resnet20", "_partial_": True}}, "_partial_"),
        ({"network": {**RESNET, "activation": {"_target_": "torch.nn.MultiheadAttention"}}}, "must be one of"),
        ({"pictures": {"size": [3, 0, 2]}}, r"pictures.size.1 \(=0\)"),
        ({"pictures": {"size": [3, 2, 2], "mean": [0.0], "std": [1.0]}}, "a number for each of 3 channels"),
        ({"classes": [1]}, r"classes.0 \(=1\): Input should be a valid string"),
    ],
)
def test_wrong_words_about_it(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        qconv.save_packed(trained(schemes.bwn()), tmp_path / "model", **extra)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model"
    with pytest.raises(FileNotFoundError, match=rf"packed model cannot be written: No such file .* '{path}'"):
        qconv.save_packed(trained(schemes.bwn()), path)


# --- Files that are wrong


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network with a weight in evenly spaced codes, one with a list of codes, and an input that has learned."""
    shifts = qconv.QConv2d(1, 2, 2, scheme=schemes.shift_q(4))
    shifts.weight.data.copy_(torch.tensor([1.0, 0.5, -0.25, 1 / 64, 1, 1 / 32, -1 / 8, -1]).view(2, 1, 2, 2))
    model = nn.Sequential(shifts, nn.BatchNorm2d(2), qconv.QConv2d(2, 2, 1, scheme=schemes.lsq(2, 2)))
    model(torch.randn(2, 1, 5, 5))
    path = tmp_path_factory.mktemp("packed") / "model.safetensors"
    qconv.save_packed(model, path)
    return path


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))


def forged(file: Path, edit: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> bytes:
    """The file with another content, and the checksum that fits it."""
    with safe_open(file, framework="pt") as opened:
        plain = json.loads(opened.metadata()["qconv"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    edit(plain, tensors)
    text = json.dumps(plain)
    try:
        plain["sha256"] = checksum(Header.model_validate(plain), tensors)
        text = json.dumps(plain)
    except ValueError:
        pass
    return save(tensors, {"qconv": text})


def refused(tmp_path: Path, data: bytes, message: str = "") -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(data)
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(qconv.PackedFileError, match=rf"(?s)^packed model {path}: .*{message}"):
        qconv.load_packed(path, model)
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.BatchNorm2d, nn.Conv2d]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_forging_alone_breaks_nothing(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "same.safetensors"
    path.write_bytes(forged(file, lambda plain, tensors: None))
    assert qconv.load_packed(path, small())(torch.ones(1, 1, 4, 4)).isfinite().all()


def test_damaged_files(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for length in (0, 7, 8, 100, len(data) - 1):
        refused(tmp_path, data[:length], "cut off, damaged, or no safetensors file")
    refused(tmp_path, data + b"\0", "cut off, damaged")
    refused(tmp_path, struct.pack("<Q", 2**62) + data[8:], "cut off, damaged")
    flipped = bytearray(data)
    flipped[-1] ^= 1
    refused(tmp_path, bytes(flipped), "its checksum does not match: it is damaged, or was edited")
    refused(tmp_path, save({"a": torch.ones(2)}), "not one of qconv")
    refused(tmp_path, save({"a": torch.ones(2)}, {"qconv": "{"}), "")
    refused(tmp_path, save({"a": torch.ones(2)}, {"qconv": "[" * 100_000}), "")
    refused(tmp_path, save({"a": torch.ones(2)}, {"qconv": '{"version":1,"version":1}'}), "'version' is there twice")
    refused(
        tmp_path, save({}, {"qconv": '{"format":"qconv-packed","version":3}'}), "version 3 of the format; .* update"
    )
    header = data[8 : 8 + struct.unpack("<Q", data[:8])[0]]
    begin = header.index(b'"1.bias"')
    repeated = header.rstrip()[:-1] + b"," + header[begin : header.index(b"}", begin) + 1] + b"}"
    repeated += b" " * (-len(repeated) % 8)
    data_twice = struct.pack("<Q", len(repeated)) + repeated + data[8 + len(header) :]
    refused(tmp_path, data_twice, "'1.bias' is there twice")
    with pytest.raises(qconv.PackedFileError, match="there is no such file"):
        qconv.load_packed(tmp_path / "none")
    with pytest.raises(qconv.PackedFileError, match="it can't be read"):
        qconv.load_packed(tmp_path / ("n" * 300))
    with pytest.raises(ValueError, match="model is on the meta device"), torch.device("meta"):
        qconv.load_packed(file, small())
    with pytest.raises(TypeError, match=r"model \(='x'\) must be a torch.nn.Module"):
        qconv.load_packed(file, "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not NoneType"):
        qconv.load_packed(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        qconv.PackedFileError, match=r"does not name its network: pass the float one, load_packed\(path, model="
    ):
        qconv.load_packed(file)


WRONG: list[Any] = [None, "x", -1, 2**70, 1.5, [], {}, [2**40] * 3]
# Other values that mean something: a name, other codes; and a network is not looked at where there is one.
RIGHT: dict[str, list[Any]] = {
    "network": [{}],
    "classes": [[]],
    "scheme": ["x"],
    "first": [-1],
    "bits": [1.5],
    "padding_value": [-1],
    "step_init": [2**70, 1.5],
    "trial": [None],
}
OPTIONAL = {"network": None, "pictures": None, "classes": None, "shared": {}}


@pytest.mark.parametrize(
    "where", ["", "layers.0", "layers.0.weight", "layers.0.arguments", "layers.2.input", "layers.2.weight"]
)
def test_every_field_wrong_in_turn(where: str, file: Path, tmp_path: Path) -> None:
    def at(plain: dict[str, Any]) -> dict[str, Any]:
        for key in where.split(".") if where else ():
            plain = plain[key]
        return plain

    header = json.loads(safe_open(file, framework="pt").metadata()["qconv"])
    fields = {**(OPTIONAL if where == "" else {}), **at(header)}
    fields.pop("sha256", None)  # a wrong one is a damaged file
    for key, value in fields.items():
        for other in WRONG:

            def edit(plain: dict[str, Any], tensors: dict[str, Tensor], key: str = key, other: Any = other) -> None:
                at(plain)[key] = other

            if other != value and other not in RIGHT.get(key, ()):
                refused(tmp_path, forged(file, edit))
    refused(tmp_path, forged(file, lambda plain, tensors: at(plain).update(unknown=1)))


Forge = Callable[[dict[str, Any], dict[str, Tensor]], object]


def drop(name: str) -> Forge:
    return lambda plain, tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Forge:
    return lambda plain, tensors: tensors.update({name: tensor})


def fill(name: str, value: float) -> Forge:
    return lambda plain, tensors: tensors[name].fill_(value)


def say(*where: str, **values: Any) -> Forge:
    """Other values in a part of the header."""
    return lambda plain, tensors: reduce(dict.__getitem__, where, plain).update(values)


CONTENTS_THAT_DO_NOT_FIT: list[tuple[Forge, str]] = [
    (drop("0.weight.codes"), r"tensor '0.weight.codes' is missing"),
    (drop("0.weight.levels"), r"tensor '0.weight.levels' is missing"),
    (drop("2.weight.scale"), r"tensor '2.weight.scale' is missing"),
    (drop("1.running_mean"), r"tensor '1.running_mean' is missing"),
    (drop("2.input_quantizer.step"), r"tensor '2.input_quantizer.step' is missing"),
    (put("more", torch.ones(1)), r"tensor 'more' of the file is not in the network"),
    (put("1.bias", torch.ones(3)), r"'1.bias' is \[3\] in the file, and \[2\] here"),
    (put("1.bias", torch.ones(2).int()), r"'1.bias' is torch.int32 in the file"),
    (put("1.bias", torch.ones(2).double()), r"is torch.float64 in the file"),
    (put("2.weight.levels", torch.ones(2)), r"levels' of the file is not in"),
    (put("0.weight.codes", torch.ones(3).byte()), r"codes': 8 numbers of radix"),
    (put("2.weight.scale", torch.ones(3)), r"must fit weights \[2, 2, 1, 1\]"),
    (fill("1.bias", math.nan), r"'1.bias' has NaN"),
    (fill("1.bias", math.inf), r"'1.bias' has NaN or inf"),
    (fill("1.running_var", -5), r"'1.running_var' \(=-5.0\) must not be negative"),
    (fill("2.weight.scale", math.inf), r"layer '2': its weight must be finite"),
    (fill("2.input_quantizer.step", -1), r"step \(=-1.0\) must be positive"),
    (fill("0.weight.codes", 255), r"codes' must be below the number of levels"),
    (say("layers", "0", type="QLinear"), r"is a Linear in the file, and a Conv2d"),
    (say("layers", "0", type="Module"), r"type \(='Module'\) must be one of"),
    (say("layers", "0", "arguments", stride=[2, 2]), r"stride is \[2, 2\]"),
    (say("layers", "2", "input", _target_="qconv.quantizers.Quantizer"), "_target_"),
    (say("layers", "2", "input", _target_="builtins.eval"), r"_target_ \(='builtins.eval'\) must be one of"),
    (say(shared={"a": "b"}), r"shared: 'a' must be another tensor"),
    (
        lambda plain, tensors: plain["layers"].update(no=plain["layers"]["0"]),
        r"layer 'no' of the file is not in the network",
    ),
]


@pytest.mark.parametrize(("edit", "message"), CONTENTS_THAT_DO_NOT_FIT)
def test_contents_that_do_not_fit(edit: Forge, message: str, file: Path, tmp_path: Path) -> None:
    refused(tmp_path, forged(file, edit), message)


def test_a_huge_network_costs_nothing(tmp_path: Path) -> None:
    model = trained(schemes.bnn(), small_cnn(3, 4, width=4), torch.randn(2, 3, 8, 8))
    path = tmp_path / "model"
    qconv.save_packed(
        model, path, network={"_target_": "qconv.models.small_cnn", "in_channels": 3, "num_classes": 4, "width": 4}
    )
    data = forged(path, lambda plain, tensors: plain["network"].update(width=2**24))
    path.write_bytes(data)
    with pytest.raises(qconv.PackedFileError, match=r"in_channels is 4 in the file|in the file, and"):
        qconv.load_packed(path)


def test_a_file_of_another_model(tmp_path: Path) -> None:
    qconv.save_packed(trained(schemes.bnn(), resnet20(), torch.randn(2, 3, 32, 32)), tmp_path / "model")
    with pytest.raises(
        qconv.PackedFileError, match=r"layer 'fc' \(Linear\): out_features is 10 in the file, and 4 here"
    ):
        qconv.load_packed(tmp_path / "model", resnet20(num_classes=4))
    with pytest.raises(qconv.PackedFileError, match=r"layer 'conv1' of the file is not in the network"):
        qconv.load_packed(tmp_path / "model", network())
    with pytest.raises(qconv.PackedFileError, match="a QConv2d here: pass the float network"):
        qconv.load_packed(tmp_path / "model", qconv.convert(resnet20(), schemes.bnn()))


FILES, CONTENTS = 4_600, 1_500
"""Of each there are two parts. Some come twice; more than 10,000 differ."""


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))
def test_no_mutated_file_gives_another_model(part: int, file: Path, tmp_path: Path) -> None:
    data, picture = file.read_bytes(), torch.randn(1, 1, 4, 4)
    right = qconv.load_packed(file, small())(picture)
    path = tmp_path / "mutated.safetensors"
    length = struct.unpack("<Q", data[:8])[0] + 8
    ranges = {"flip": (1, 255), "cut": (1, 40), "repeat": (1, 40), "digit": (48, 57), "move": (1, 40)}
    draw, seen = random.Random(part), set()

    def change() -> tuple[str, int, int]:
        # Half of them in the header, which is a text: other texts come through more checks than other bits.
        first, end = draw.choice(((0, len(data)), (8, length)))
        kind = draw.choice(tuple(ranges))
        return kind, draw.randrange(first, end), draw.randint(*ranges[kind])

    for _ in range(FILES):
        mutated = bytearray(data)
        for kind, place, value in [change() for _ in range(draw.randint(1, 4))]:
            place = min(place, len(mutated) - 1)
            if kind == "flip":
                mutated[place] ^= value
            elif kind == "digit":
                mutated[place] = value
            elif kind == "cut":
                del mutated[place : place + value]
            elif kind == "repeat":
                mutated[place:place] = mutated[place : place + value]
            else:
                moved = mutated[place : place + value]
                del mutated[place : place + value]
                mutated[place // 2 : place // 2] = moved
            if not mutated:
                mutated.append(0)
        seen.add(bytes(mutated))
        path.write_bytes(mutated)
        try:
            loaded = qconv.load_packed(path, small())
        except qconv.PackedFileError:
            continue
        assert torch.equal(loaded(picture), right), path
    assert len(seen) > 4_000


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))
def test_no_other_content_crashes(part: int, file: Path, tmp_path: Path) -> None:
    """Header and tensors that are changed, with the checksum that fits: refused, or a model that computes."""
    path, picture = tmp_path / "mutated.safetensors", torch.randn(1, 1, 4, 4)
    with safe_open(file, framework="pt") as opened:
        text = opened.metadata()["qconv"]
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    places = list(paths(json.loads(text)))
    values = st.one_of(
        *(st.none(), st.booleans(), st.integers(-4, 40), st.integers(), st.floats(), st.text(max_size=5)),
        *(st.lists(st.integers(-3, 9), max_size=4), st.sampled_from(["QLinear", "QConv1d", "float64", "float16", {}])),
        st.sampled_from(sorted(f"qconv.quantizers.{name}" for name in vars(qconv.quantizers))),
    )
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.uint8, torch.int64, torch.bool])
    shapes = st.lists(st.integers(0, 4), max_size=4)
    fills = st.one_of(st.integers(0, 255), st.floats(width=16))
    edits = st.one_of(
        st.tuples(st.just("value"), st.sampled_from(places), values),
        st.tuples(st.just("remove"), st.sampled_from(places), values),
        st.tuples(st.just("tensor"), st.sampled_from(sorted(tensors)), st.tuples(dtypes, shapes, fills)),
        st.tuples(st.just("fill"), st.sampled_from(sorted(tensors)), fills),
        st.tuples(st.just("drop"), st.sampled_from(sorted(tensors)), st.none()),
    )
    seen, loaded_ones = set(), 0

    @settings(max_examples=CONTENTS, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @seed(part)
    @given(st.lists(edits, min_size=1, max_size=3))
    def change(changes: list[tuple[str, Any, Any]]) -> None:
        nonlocal loaded_ones

        def edit(plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
            for kind, place, value in changes:
                if kind in ("value", "remove"):
                    change_at(plain, place, value, kind == "remove")
                elif kind == "tensor":
                    dtype, shape, fill = value
                    tensors[place] = torch.full(shape, fill).nan_to_num(0).to(dtype)
                elif kind == "fill" and place in tensors:
                    tensors[place] = torch.full(tensors[place].shape, value).to(tensors[place].dtype)
                elif kind == "drop":
                    tensors.pop(place, None)

        data = forged(file, edit)
        seen.add(data)
        path.write_bytes(data)
        try:
            loaded = qconv.load_packed(path, small())
        except qconv.PackedFileError:
            return
        loaded_ones += 1
        assert loaded(picture.to(next(loaded.parameters()).dtype)).shape == (1, 2, 3, 3)

    change()
    assert len(seen) > 1_050
    assert loaded_ones > 10


def paths(plain: Any, begin: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        yield (*begin, key)
        yield from paths(value, (*begin, key))


def change_at(plain: Any, place: tuple[Any, ...], value: Any, remove: bool) -> None:
    *begin, last = place
    try:
        for key in begin:
            plain = plain[key]
        if remove:
            del plain[last]
        else:
            plain[last] = value
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change has taken the place away


def test_calls_are_those_that_were_made() -> None:
    quantizers = qconv.quantizers
    assert quantizer_call(quantizers.DoReFaInput(4)) == {"_target_": "qconv.quantizers.DoReFaInput", "bits": 4}
    for scheme in METHODS.values():
        made = scheme.input()
        if not isinstance(made, quantizers.Stages):
            call = quantizer_call(made)
            assert json.loads(json.dumps(call)) == call
            assert quantizer_call(build_quantizer(call)) == call
    deep: dict[str, Any] = {"_target_": "qconv.quantizers.Sign"}
    for _ in range(50):
        deep = {"_target_": "qconv.quantizers.Sign", "surrogate": {**deep, "_partial_": True}}
    with pytest.raises(ValueError, match="calls not so deep"):
        build_quantizer(deep)


@pytest.mark.skipif(shutil.disk_usage("/dev").total == 0 or not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qconv.ground import files

    class Full(files.atomic_file):
        def __enter__(self):
            super().__enter__().close()
            self.file = Path("/dev/full").open("wb")
            return self.file

    monkeypatch.setattr("qconv.packed.save.atomic_file", Full)
    with pytest.raises(OSError, match="cannot be written: No space left on device"):
        qconv.save_packed(trained(schemes.bwn()), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_file_of_codes_alone_keeps_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten())

    model = qconv.convert(network(), schemes.bnn(), skip=()).to(dtype).eval()
    qconv.save_packed(model, tmp_path / "model")
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    assert qconv.load_packed(tmp_path / "model", network())(x).equal(model(x))


def test_hooks_are_not_in_the_file(tmp_path: Path) -> None:
    model = qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), schemes.bwn(), skip=()).eval()
    model[1].register_forward_hook(lambda module, args, output: output.mul(3))
    with pytest.warns(UserWarning, match=r"layer '1' \(ReLU\) has hooks, which the file does not hold"):
        qconv.save_packed(model, tmp_path / "model")
