"""Layers that a model never calls though it computes with their weights: found, said, and not shipped."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import qconv
from qconv import schemes


class Attention(nn.Module):
    """Reads the weight of ``inner`` itself, in evaluation alone if ``called_in_training``."""

    def __init__(self, called_in_training: bool = False) -> None:
        super().__init__()
        self.called_in_training = called_in_training
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.called_in_training:
            return self.outer(self.inner(input))
        return self.outer(F.linear(input, self.inner.weight.to(input.dtype), self.inner.bias))


class Network(nn.Module):
    """A head for training alone, a layer that is read for its dtype, and a branch that is not always taken."""

    def __init__(self, called_in_training: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.attention = Attention(called_in_training)
        self.head = nn.Linear(8, 8)
        self.auxiliary = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, input: Tensor, depth: int = 0) -> Tensor:
        features = self.attention(self.stem(input.to(self.stem.weight.dtype)))
        for _ in range(depth):
            features = self.head(features)
        if self.training:
            features = features + self.auxiliary(features)
        return self.last(features)


class Skipping(nn.Sequential):
    """Never calls its last module."""

    def forward(self, input: Tensor) -> Tensor:
        for module in list(self)[:-1]:
            input = module(input)
        return input


def test_healthy_models_are_left_in_peace() -> None:
    model = torchvision.models.googlenet(weights=None, init_weights=False, aux_logits=True)
    qconv.convert(model, schemes.bnn())
    model.eval()(torch.zeros(1, 3, 64, 64))
    tied = Skipping(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4))
    tied[3].weight = tied[0].weight
    qconv.convert(tied, schemes.lsq(2, 2), skip=())
    tied(torch.tensor([1, 2]))


def test_nothing_is_shipped_with_it(tmp_path: Path) -> None:
    model, input = qconv.convert(Network(), schemes.bnn()).eval(), torch.randn(2, 8)
    message = (
        r"layer 'attention.inner' \(QLinear, bnn\(\)\) is quantized, but the model reads its weight and never calls it"
    )
    with pytest.raises(ValueError, match=message):
        qconv.save_packed(model, tmp_path / "model.safetensors", example=input)
    with pytest.raises(ValueError, match=message):
        qconv.freeze(model, example=input)
    qconv.convert(qconv.to_float(model), schemes.bnn(), skip=("first", "last", ".*inner"))
    qconv.freeze(model, example=input)
    qconv.save_packed(model, tmp_path / "model.safetensors", example=input)


def test_summary_counts_it_as_float() -> None:
    table = qconv.summarize(qconv.convert(Network(), schemes.bnn()), (8,))
    rows = {row.name: row for row in table.rows}
    assert rows["attention.inner"].scheme == "float: never called, not bnn()"
    assert (rows["attention.inner"].weight_bits, rows["attention.inner"].input_bits) == (32, 32)
    assert rows["attention.outer"].weight_bits == 1
    assert rows["never"].weight_bits == 1


@pytest.mark.parametrize("example", [torch.randn(2, 8), (torch.randn(2, 8), 1), {"input": torch.randn(2, 8)}], ids=type)
def test_an_example_leaves_it_float(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = Network()
    state = torch.random.get_rng_state()
    qconv.plan(model, schemes.bnn(), example=example)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["attention.inner"] == "Linear stays: Attention reads its weight and never calls it"
    assert lines["attention.outer"] == "Linear → QLinear bnn()"
    assert lines["never"] == "Linear → QLinear bnn() (not called with the example)"
    assert ("not called" in lines["head"]) == (not isinstance(example, tuple))
    assert model.training
    assert torch.random.get_rng_state().equal(state)
    assert not any(module._forward_pre_hooks for module in model.modules())
    qconv.convert(model, schemes.bnn(), example=example)
    assert type(model.attention.inner) is nn.Linear
    model(torch.randn(2, 8))
    with pytest.raises(
        ValueError, match=r"overrides '.\*inner': layer 'attention.inner' \(Linear\) can't be quantized: Attention"
    ):
        qconv.convert(Network(), schemes.bnn(), overrides={".*inner": schemes.bwn()}, example=example)


def test_swin_keeps_the_layers_that_it_reads() -> None:
    model = torchvision.models.swin_t(weights=None)
    steps = qconv.plan(model, schemes.bnn()).steps
    read = [step for step in steps if "reads its weight" in step.reason]
    assert len(read) == 24
    assert {step.names[0].rpartition(".")[2] for step in read} == {"qkv", "proj"}
    qconv.convert(model, schemes.bnn())
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, 32, 32))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
def test_encoders_use_their_quantized_layers_in_evaluation(nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    input, mask = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        before = model(input, src_key_padding_mask=mask)
    qconv.convert(model, schemes.bnn(), skip=(), before_sign="keep")
    model(input, src_key_padding_mask=mask)
    with torch.no_grad():
        fast = model(input, src_key_padding_mask=mask)
    assert not torch.allclose(fast, before, atol=0.1)
    torch.testing.assert_close(fast, model(input, src_key_padding_mask=mask))  # with gradients it has no fast path
    torch.testing.assert_close(fast, model.train()(input, src_key_padding_mask=mask))
    first: Any = model.layers[0]
    assert type(first.self_attn.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
    assert type(first.linear1) is qconv.QLinear
    qconv.to_float(model.eval())
    with torch.no_grad():
        assert model(input, src_key_padding_mask=mask).equal(before)


def test_a_packed_encoder_calls_its_layers(tmp_path: Path) -> None:
    build = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()  # noqa: E731
    model = qconv.convert(build(), schemes.bwn(), skip=())
    input = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = model(input)
    qconv.save_packed(model, tmp_path / "model.safetensors")
    loaded = qconv.load_packed(tmp_path / "model.safetensors", build())
    with torch.no_grad():
        assert loaded(input).equal(expected)


def test_a_compiled_model_stays_in_one_graph() -> None:
    model = qconv.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), schemes.bnn())
    input = torch.randn(2, 8)
    assert torch.compile(model, fullgraph=True, backend="eager")(input).equal(model(input))


def by_module(model: nn.Module) -> None:
    model.part = torch.compile(model.part, fullgraph=True, backend="eager")  # pyright: ignore


def by_call(model: nn.Module) -> None:
    model.part.compile(fullgraph=True, backend="eager")  # pyright: ignore


def by_forward(model: nn.Module) -> None:
    model.part.forward = torch.compile(model.part.forward, fullgraph=True, backend="eager")  # pyright: ignore


def by_function(model: nn.Module) -> None:
    model.function = torch.compile(F.hardtanh, fullgraph=True, backend="eager")  # pyright: ignore


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = F.hardtanh
        self.stem, self.part, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.function(self.part(self.stem(input))))


@pytest.mark.parametrize("compile_a_part", [by_module, by_call, by_forward, by_function])
def test_parts_are_compiled_in_the_first_forward(compile_a_part: Any) -> None:
    model, input = qconv.convert(Parted(), schemes.bnn()), torch.randn(2, 8)
    twin = copy.deepcopy(model)
    compile_a_part(model)
    with torch.no_grad():
        assert model(input).equal(twin(input))
        assert model.eval()(input).equal(twin.eval()(input))


def test_a_quantized_layer_is_not_mapped() -> None:
    layer = qconv.QConv2d(3, 4, 3)
    with pytest.raises(RuntimeError, match=r"torch.vmap can't map quantized layers: call the model for each sample"):
        torch.vmap(layer)(torch.randn(2, 1, 3, 8, 8))
