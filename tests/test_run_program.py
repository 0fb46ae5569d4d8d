"""The operator `qconv::run_program`: frozen networks that torch compiled or exported, in Python and in C++."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import mostly_nightly
from test_program import NETWORKS, every, network, trained
from torch import Tensor, nn
from torch.export import Dim

import qconv
from qconv import schemes
from qconv.inference import FrozenModel, freeze
from qconv.inference.build import build
from qconv.kernels.native import kernels
from qconv.program import planned
from qconv.program.operations import Program
from qconv.program.plan import program_bytes
from qconv.program.planned import output_shape, run_program
from qconv.program.read import read_program

ROOT = Path(__file__).parents[1]
SIZES = (4, 3, 16, 16), (1, 3, 16, 16), (3, 3, 21, 13)

pytestmark = pytest.mark.skipif(kernels() is None, reason="qconv was installed without a C compiler")


class Spatial(nn.Module):
    """A network whose output has pixels, with a window of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 5, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
            *(nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(8, 7, 3, dilation=2, padding=2), nn.AvgPool2d(2, ceil_mode=True)),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.layers(input)


@pytest.fixture(scope="module")
def bnn() -> FrozenModel:
    return build(network("bnn"), torch.randn(2, 3, 16, 16))


def operator_arguments(frozen: FrozenModel, images: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    program = frozen.program(images)
    return program_bytes(program, guard=True), images, list(program.shape())


def called(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", mostly_nightly(["bireal", "lsq44", "spatial"], ["spatial"]))
def test_an_exported_plan_is_one_node_for_batches_and_images_of_any_size(name: str) -> None:
    spatial = trained(Spatial(), None, torch.randn(8, 3, 32, 32))
    images = torch.randn(2, 3, 24, 24)
    frozen = build(spatial if name == "spatial" else network(name), images)
    sizes = {0: Dim("batch"), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    exported = torch.export.export(frozen, (images,), dynamic_shapes=(sizes,))
    assert called(exported.graph_module) == ["qconv.run_program.default"]
    module = exported.module()
    for size in SIZES:
        images = torch.randn(size)
        wanted = frozen(images)
        assert torch.equal(module(images), wanted)
        assert output_shape(images.to("meta"), frozen.program(images).shape()) == tuple(wanted.shape)
    strided = torch.randn(3, 16, 16, 3).permute(0, 3, 1, 2)[:, :, ::2]
    assert torch.equal(module(strided), frozen(strided))


def test_a_network_that_is_bound_to_one_size() -> None:
    images = torch.randn(4, 3, 8, 8)
    frozen = build(trained(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 5)), None, images), images)
    wanted = frozen(images)
    module = torch.export.export(frozen, (images,), dynamic_shapes=({0: Dim("batch")},)).module()
    assert torch.equal(module(images[:3]), wanted[:3])
    with pytest.raises(ValueError, match="the program is for images of 8 x 8"):
        run_program(*operator_arguments(frozen, images)[:1], torch.randn(1, 3, 9, 9), [5])


def test_a_network_of_which_half_an_image_is_too_small() -> None:
    torch._dynamo.reset()
    images = torch.randn(4, 3, 12, 12)
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 3)), schemes.bwn(), images)
    frozen = build(model, images)
    assert frozen.program(images).size is None
    compiled: Any = torch.compile(frozen, backend="eager", dynamic=True)
    for size in ((12, 12), (7, 30), (20, 9)):
        images = torch.randn(2, 3, *size)
        assert torch.equal(compiled(images), frozen(images))
        torch.testing.assert_close(frozen(images), model(images))
    with pytest.raises(RuntimeError, match="images are too small for a window of the program"):
        compiled(images[..., :6])


@pytest.mark.nightly
@pytest.mark.parametrize(("nan", "breaks"), [("pass", 0), ("refuse", 1)])
def test_a_compiled_model_equals_the_frozen_one(nan: Any, breaks: int) -> None:
    torch._dynamo.reset()
    frozen = freeze(network("bireal"), nan=nan)
    compiled: Any = torch.compile(frozen, backend="aot_eager", fullgraph=not breaks)
    for size in SIZES:
        images = torch.randn(size)
        wanted = frozen(images)
        assert torch.equal(compiled(images), wanted)
    explained = torch._dynamo.explain(frozen)(torch.randn(SIZES[0]))
    assert explained.graph_break_count == breaks
    assert called(explained.graphs[-1]) == ["qconv.run_program"]
    bad = torch.randn(SIZES[0])
    bad[1, 2, 3, 4] = torch.nan
    if nan == "pass":
        assert compiled(bad).isnan().all(1).tolist() == [False, True, False, False]
    else:
        with pytest.raises(ValueError, match="input has NaN or inf in 1 of 4 samples"):
            compiled(bad)


def test_what_wants_a_gradient_or_another_dtype_is_traced_through_the_modules(bnn: FrozenModel) -> None:
    images = torch.randn(2, 3, 16, 16)
    wanted = bnn(images)
    compiled = torch.compile(bnn, backend="eager")
    assert torch.allclose(compiled(images.clone().requires_grad_()), wanted, atol=1e-5)
    with torch.autocast("cpu"):
        assert compiled(images).shape == wanted.shape


@pytest.mark.filterwarnings("ignore")
def test_the_operator_is_sound(bnn: FrozenModel) -> None:
    arguments = operator_arguments(bnn, torch.randn(3, 3, 21, 13))
    torch.library.opcheck(torch.ops.qconv.run_program.default, arguments)
    arguments = operator_arguments(bnn, torch.randn(0, 3, 16, 16))
    assert torch.ops.qconv.run_program(*arguments).shape == (0, 10)


def test_programs_are_told_apart_by_their_bytes(bnn: FrozenModel) -> None:
    images = torch.randn(2, 3, 16, 16)
    other = build(trained(NETWORKS["bnn"][0](), NETWORKS["bnn"][1], images), images)
    content, _, shape = operator_arguments(bnn, images)
    place = content.clone()
    assert torch.equal(torch.ops.qconv.run_program(place, images, shape), bnn(images))
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), content])[3:]
    assert torch.equal(torch.ops.qconv.run_program(shifted, images, shape), bnn(images))
    place.copy_(operator_arguments(other, images)[0])
    assert torch.equal(torch.ops.qconv.run_program(place, images, shape), other(images))
    assert not torch.equal(bnn(images), other(images))


@pytest.mark.parametrize("name", ["every", "spatial", *mostly_nightly(NETWORKS, [])])
def test_bytes_are_read_as_the_program_that_they_were_written_from(name: str) -> None:
    cases = [(every(kinds, groups), torch.randn(2, 5, 11, 14)) for kinds in range(3) for groups in (1, 2, 6)]
    if name != "every":
        model = trained(Spatial(), None, torch.randn(8, 3, 16, 16)) if name == "spatial" else network(name)
        images = torch.randn(2, 3, 12, 9)
        cases = [(build(model, images).program(images), images)]
    for program, images in cases:
        read, guard = read_program(program_bytes(program, guard=False))
        assert not guard
        assert torch.equal(read.run(images).flatten(1), program.run(images).flatten(1))


def test_without_kernels_the_definition_runs(bnn: FrozenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(3, 3, 12, 9)
    images[1, 2, 3, 4] = torch.inf
    program, _, shape = operator_arguments(bnn, images)
    wanted = bnn(images)
    calls: list[int] = []
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda self, images: calls.append(1) or run(self, images))
    monkeypatch.setattr(planned, "kernels", lambda: None)
    assert torch.equal(torch.ops.qconv.run_program(program, images, shape).nan_to_num(7), wanted.nan_to_num(7))
    assert calls == [1]
    check_mistakes(program, images, shape)


def test_mistakes(bnn: FrozenModel) -> None:
    check_mistakes(*operator_arguments(bnn, torch.randn(2, 3, 16, 16)))


def check_mistakes(program: Tensor, images: Tensor, shape: list[int]) -> None:
    count = len(images)

    for changed, message in [
        ((program[:-9], images, shape), r"the file has .*\d+ bytes"),
        ((program[:9], images, shape), "a file of 9 bytes is too short|not the file of a program"),
        ((program.float(), images, shape), r"program \(torch.float32, 1 dimensions\) must be bytes"),
        ((program, images[0], shape), r"images \(torch.float32, 3 dimensions\) must be float32 \(N, C, H, W\)"),
        ((program, images.double(), shape), r"images \(torch.float64, 4 dimensions\) must be"),
        ((program, images[:, :2], shape), "images have 2 channels; the program takes 3"),
        (
            (program, images, [11]),
            rf"shape \(=\[11\]\) gives an output \({count}, 11\); the program's is \({count}, 10\)",
        ),
        ((program, images, [10, 0, 1, 0, 1]), rf"the program's is \({count}, 10, 1, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            torch.ops.qconv.run_program(*changed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bireal", "spatial"])
def test_an_exported_file_runs_in_another_process(name: str, tmp_path: Path) -> None:
    images = torch.randn(100, 3, 16, 16)
    model = trained(Spatial(), None, images) if name == "spatial" else network(name)
    qconv.export(model, tmp_path / "model.pt2", to="pt2", images=images)
    frozen = build(model, images)
    assert (tmp_path / "model.pt2").stat().st_size < len(frozen.program_bytes(images)) + 64000  # images are 307,200
    given = [torch.randn(size) for size in SIZES]
    torch.save(given, tmp_path / "images.pt")
    code = """
import torch, qconv.inference
module = torch.export.load("model.pt2").module()
torch.save([module(images) for images in torch.load("images.pt")], "outputs.pt")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    for images, output in zip(given, torch.load(tmp_path / "outputs.pt"), strict=True):
        assert torch.equal(output, frozen(images))


# C++


def block(language: str, having: str) -> str:
    """A block of the page that describes C++."""
    page = (ROOT / "docs" / "which_runtime.md").read_text()
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if having in text)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the commands of the page have built the library."""
    for tool in ("cc", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    folder = tmp_path_factory.mktemp("library")
    shutil.copytree(ROOT / "qconv" / "kernels" / "csrc", folder, dirs_exist_ok=True)
    run_commands(block("bash", "libqconv_torch.so").replace("cd qconv/kernels/csrc\n", ""), folder)
    return folder


def run_commands(commands: str, folder: Path, input: bytes = b"") -> bytes:
    python = f'python() {{ {sys.executable} "$@"; }}\n'
    done = subprocess.run(["bash", "-ec", python + commands], cwd=folder, input=input, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout


@pytest.mark.nightly
def test_python_without_qconv_runs_an_exported_file(library: Path, tmp_path: Path) -> None:
    model, images = network("lsq44"), torch.randn(2, 3, 16, 16)
    qconv.export(model, tmp_path / "model.pt2", to="pt2", images=images)
    frozen = freeze(model)
    given = [torch.randn(size) for size in SIZES]
    torch.save((given, [frozen(images) for images in given]), tmp_path / "images.pt")
    code = """
import sys, torch
load = "torch.ops.load_library(sys.argv[1])"
for step in sys.argv[2].split(","):
    exec({"library": load, "qconv": "import qconv.inference"}[step])
program = torch.export.load("model.pt2")
for images, wanted in zip(*torch.load("images.pt")):
    assert torch.equal(program.module()(images), wanted)
    assert torch.equal(program.module()(images.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)), wanted)
assert "qconv" not in sys.modules or "qconv" in sys.argv[2]
content, images = program.state_dict["content"], images
for changed in ((content[:-9], images, [10]), (content[:9], images, [10]), (content.float(), images, [10]),
                (content, images[0], [10]), (content, images.double(), [10]), (content, images[:, :2], [10]),
                *((content, images, shape) for shape in ([11], [], [10, 0, 1], [10, 0, 1, 0, 1], [10, 0, 0, 0, 0]))):
    try:
        torch.ops.qconv.run_program(*changed)
    except RuntimeError as error:
        print(str(error).partition("\\n")[0])
"""
    for steps in ("library", "library,qconv", "qconv,library"):
        command = [sys.executable, "-c", code, str(library / "libqconv_torch.so"), steps]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        lines = done.stdout.decode().splitlines()
        for line, message in zip(
            lines,
            [
                r"run_program: the file has \d+ bytes, and should have \d+",
                r"run_program: a file of 9 bytes is too short",
                r"run_program: program must be bytes, of one dimension",
                *[r"run_program: images must be float32 \(N, C, H, W\)"] * 2,
                r"run_program: images have 2 channels; the program takes 3",
                *[r"run_program: shape does not give the program's output, of 10 x 1 x 1"] * 5,
            ],
            strict=True,
        ):
            assert re.search(message, line), line


@pytest.mark.nightly
def test_a_program_in_cpp_runs_a_package(library: Path, tmp_path: Path) -> None:
    images = torch.randn(5, 3, 32, 32)
    model = trained(NETWORKS["bireal"][0](), NETWORKS["bireal"][1], images)
    qconv.export(model, tmp_path / "model.pt2", to="pt2", images=images)
    frozen = freeze(model)
    run_commands(f"cd {tmp_path}\n" + block("bash", "aoti_compile_and_package"), tmp_path)
    shutil.copy(tmp_path / "model.package.pt2", library)
    (library / "run.cpp").write_text(block("cpp", "AOTIModelPackageLoader"))
    commands = block("bash", "run.cpp")
    for count in (5, 1):
        (library / "images").write_bytes(images[:count].numpy().tobytes())
        printed = run_commands(commands, library).decode().split()
        rows = torch.tensor([float(number) for number in printed]).view(count, 10)
        assert torch.equal(rows, frozen(images[:count]))
    assert b"python" not in subprocess.run(["ldd", library / "run"], capture_output=True, check=True).stdout.replace(
        str(Path(torch.__file__).parent.parent).encode(), b""
    )
