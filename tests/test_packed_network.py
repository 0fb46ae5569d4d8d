"""A packed file belongs to one network: others with the same tensors are refused by its test vector."""

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from settings import default_dtype
from torch import Tensor, fx, nn
from torchvision.ops import StochasticDepth

import qconv
from qconv import PackedFileError, schemes
from qconv.packed import read_header
from qconv.packed.header import Header, checksum, to_json
from qconv.packed.stored_outputs import check_trial, make_trial


class Network(nn.Module):
    """A small network of which every part can be another one."""

    def __init__(
        self,
        activation: Callable[[], nn.Module] = nn.Hardtanh,
        pool: Callable[[], nn.Module] = lambda: nn.MaxPool2d(2),
        stride: int = 1,
        function: Callable[[Tensor], Tensor] = F.hardtanh,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=stride, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.activation = activation()
        self.pool = pool()
        self.drop = nn.Dropout(drop)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 4)
        self.function = function  # set after construction, and no argument that is plain

    def forward(self, input: Tensor) -> Tensor:
        """The scores of four classes."""
        x = self.pool(self.activation(self.norm(self.stem(input))))
        return self.fc(self.function(self.conv(self.drop(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model = qconv.convert(Network(), schemes.bnn())
    for _ in range(3):
        model(torch.randn(16, 3, 8, 8))
    return model.eval()


@pytest.fixture(scope="module")
def file(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "model.safetensors"
    qconv.save_packed(trained, path, example=torch.zeros(1, 3, 8, 8))
    return path


@pytest.mark.parametrize(
    "other",
    [
        {"activation": nn.ReLU},
        {"stride": 2},
        {"pool": lambda: nn.AvgPool2d(2)},
        {"pool": lambda: nn.MaxPool2d(2, padding=1)},
        {"function": F.relu},
    ],
)
def test_another_network_is_found_by_the_test_vector(other: dict[str, Any], file: Path, trained: nn.Module) -> None:
    model = Network(**other)
    before = copy.deepcopy(model)
    with pytest.raises(PackedFileError, match=r"something other than the saved one.*off by \d+%"):
        qconv.load_packed(file, model)
    assert str(model) == str(before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(qconv.load_packed(file, Network())(x), trained(x))


def test_graphs_that_were_traced(trained: nn.Module, tmp_path: Path) -> None:
    """Whose class has another name in each copy."""
    torch.manual_seed(0)
    network = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)))
    model = qconv.convert(copy.deepcopy(network), schemes.bwn(), skip=())
    qconv.save_packed(model, tmp_path / "graph.safetensors")
    loaded, input = qconv.load_packed(tmp_path / "graph.safetensors", network), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(loaded(input), model.eval()(input))


def test_norms_of_several_devices_are_those_of_one(trained: nn.Module, tmp_path: Path) -> None:
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(trained))
    qconv.save_packed(synced, tmp_path / "synced.safetensors")
    loaded = qconv.load_packed(tmp_path / "synced.safetensors", Network())
    input = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(loaded(input), trained.eval()(input))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_test_vector_is_the_same_in_every_default_dtype(
    dtype: torch.dtype, file: Path, trained: nn.Module, tmp_path: Path
) -> None:
    with default_dtype(dtype):
        qconv.load_packed(file, Network().float())
        qconv.save_packed(trained, tmp_path / "other.safetensors", example=torch.randn(2, 3, 8, 8))
    qconv.load_packed(tmp_path / "other.safetensors", Network())


def test_an_example_that_the_model_refuses(trained: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the shape of example without its first dimension \(=\(8, 8\)\) must be one"):
        qconv.save_packed(trained, tmp_path / "no.safetensors", example=torch.randn(3, 8, 8))


def test_what_changes_nothing_in_evaluation_may_differ(file: Path, trained: nn.Module) -> None:
    model = Network(activation=lambda: nn.Hardtanh(inplace=True), drop=0.5)
    model.norm.momentum = 0.5
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(qconv.load_packed(file, model)(x), trained(x))


class Attentive(nn.Module):
    """Keeps arguments that act in training alone, and one that is nobody's."""

    def __init__(self, drop: float, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, dropout=drop)
        self.depth = StochasticDepth(drop, "row")
        self.hidden = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Two numbers for each row."""
        x = self.first(x)
        return self.last(self.hidden(self.depth(self.attention(x, x, x)[0])))


def test_arguments_of_training_and_of_other_packages_may_differ(tmp_path: Path) -> None:
    saved = qconv.convert(Attentive(0.2, 90), schemes.bwn()).eval()
    qconv.save_packed(saved, tmp_path / "model", example=torch.zeros(1, 8))
    x = torch.randn(5, 8)
    assert torch.equal(qconv.load_packed(tmp_path / "model", Attentive(0.0, 1))(x), saved(x))
    other = Attentive(0.2, 90)
    other.attention = nn.MultiheadAttention(8, 4)
    with pytest.raises(PackedFileError, match="something other than the saved one"):
        qconv.load_packed(tmp_path / "model", other)


def test_buffers_that_are_not_stored_keep_their_dtype(tmp_path: Path) -> None:
    class Scaled(nn.Sequential):
        factor: Tensor

        def __init__(self) -> None:
            super().__init__(nn.Conv2d(3, 4, 3))
            self.register_buffer("factor", torch.tensor([1 / 3], dtype=torch.float64), persistent=False)

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * self.factor

    saved = qconv.convert(Scaled(), schemes.bwn(), skip=()).eval()
    qconv.save_packed(saved, tmp_path / "model")
    loaded, x = qconv.load_packed(tmp_path / "model", Scaled()), torch.randn(2, 3, 5, 5)
    assert loaded(x).dtype == torch.float64
    assert torch.equal(loaded(x), saved(x))


def test_writing_leaves_the_model_as_it_is(trained: nn.Module, tmp_path: Path) -> None:
    model = copy.deepcopy(trained).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    qconv.save_packed(model, tmp_path / "model", example=torch.zeros(1, 3, 8, 8))
    assert all(module.training for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class OfSides(Network):
    """Takes images of one size alone, which is no usual one."""

    def forward(self, input: Tensor) -> Tensor:
        """The scores of four classes."""
        return super().forward(input.view(-1, 3, 9, 9))


class OfTwo(Network):
    """Takes two inputs."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The scores of four classes."""
        return super().forward(input + other)


def test_without_an_example_usual_shapes_are_tried(trained: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model"
    model = copy.deepcopy(trained).train()
    qconv.save_packed(model, path)
    trial = read_header(path).trial
    assert trial is not None
    assert trial.shape == [3, 32, 32]
    assert model.training
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(qconv.load_packed(path, Network())(x), trained(x))
    with pytest.raises(PackedFileError, match="a function in a forward differs"):
        qconv.load_packed(path, Network(function=F.relu))


def test_where_no_usual_shape_suits_it_is_told(trained: nn.Module, tmp_path: Path) -> None:
    for kind in (OfSides, OfTwo):
        model = copy.deepcopy(trained)
        model.__class__ = kind
        if kind is OfTwo:  # which an example could not mend
            qconv.save_packed(model, tmp_path / "model")
            qconv.save_packed(model.half(), tmp_path / "model")
        else:
            with pytest.warns(
                UserWarning, match=r"no usual input shape suits it.*save_packed\(model, path, example=batch\)"
            ):
                qconv.save_packed(model, tmp_path / "model")
            assert read_header(tmp_path / "model").trial is None
            qconv.save_packed(model, tmp_path / "model", example=torch.zeros(1, 3, 9, 9))
        assert (read_header(tmp_path / "model").trial is not None) == (kind is OfSides)


class Locked(Network):
    """Holds what can't be copied."""

    lock: Any


def test_a_model_that_can_not_be_copied_has_no_test(trained: nn.Module, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(trained)
    model.__class__, model.lock = Locked, threading.Lock()
    for example in (None, torch.zeros(1, 3, 8, 8)):
        with pytest.warns(UserWarning, match=r"tensors: a model that can't be copied \(.*lock.*\) is not tried$"):
            qconv.save_packed(model, tmp_path / "model", example=example)
        assert read_header(tmp_path / "model").trial is None


def test_a_scale_of_the_whole_batch_is_that_of_the_two_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = qconv.convert(Network(), schemes.fp8())
    model(torch.randn(16, 3, 8, 8))
    qconv.save_packed(model.eval(), tmp_path / "model", example=torch.zeros(1, 3, 8, 8))
    assert read_header(tmp_path / "model").trial is not None
    qconv.load_packed(tmp_path / "model", Network())


def test_rounding_is_allowed_and_a_planted_difference_is_not(trained: nn.Module) -> None:
    trial = make_trial(trained, (3, 8, 8))
    assert trial is not None
    assert trial.tolerance < 0.1
    check_trial(copy.deepcopy(trained).double().float(), trial)
    other = copy.deepcopy(trained)
    other.fc.register_forward_hook(lambda _, args, output: output * (1 + 3 * trial.tolerance))  # pyright: ignore
    with pytest.raises(ValueError, match="something other than the saved one"):
        check_trial(other, trial)
    silent = copy.deepcopy(trained)
    silent.fc.register_forward_hook(lambda _, args, output: output * float("nan"))  # pyright: ignore
    with pytest.raises(ValueError, match="something other than the saved one"):
        check_trial(silent, trial)


def test_old_files_still_load(file: Path, trained: nn.Module, tmp_path: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    plain = json.loads(to_json(read_header(file)))
    del plain["trial"]
    old = Header.model_validate({**plain, "version": 1})
    old = old.model_copy(update={"sha256": checksum(old, tensors)})
    assert '"version":1' in to_json(old)
    (tmp_path / "old").write_bytes(save(tensors, {"qconv": to_json(old)}))
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(qconv.load_packed(tmp_path / "old", Network())(x), trained(x))
    qconv.load_packed(tmp_path / "old", Network(activation=nn.ReLU))  # which nothing tells, as its docstring says


def test_a_model_that_asserts_its_size_is_tried_at_another(tmp_path: Path) -> None:
    """As vision transformers do."""

    class Asserting(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert input.shape[-1] == 224
            return super().forward(input)

    def make() -> nn.Module:
        return Asserting(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    model = qconv.convert(make(), schemes.bwn(), skip=()).eval()
    qconv.save_packed(model, tmp_path / "model.safetensors")
    input = torch.randn(2, 3, 224, 224)
    assert qconv.load_packed(tmp_path / "model.safetensors", make())(input).equal(model(input))


def test_a_real_weight_that_a_quantized_layer_shares_stays_as_it_is(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
            self.c.weight = self.b.weight

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(self.a(input))))

    for real in "bc":
        model = qconv.convert(Tied(), schemes.dorefa(2, 2), overrides={real: schemes.identity()}, skip=()).eval()
        qconv.save_packed(model, tmp_path / "model.safetensors")
        input = torch.randn(2, 4, 6, 6)
        assert qconv.load_packed(tmp_path / "model.safetensors", Tied())(input).equal(model(input))
