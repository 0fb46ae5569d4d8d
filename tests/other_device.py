"""Trainings and what comes after them on a device that is not the CPU: that of the library whose path is given."""

import copy
import io
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from methods import METHODS
from PIL import Image
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.data.large import Crop
from qconv.data.prepared import Encoded
from qconv.images import DecodingError

OTHER = "other"
STAGED = "staged([(0, lsq(weight_bits=4, input_bits=4)), (0.5, lsq(weight_bits=2, input_bits=2))])"
READS = {"siman()": 3, STAGED: 3}
"""Methods that read from the device in the last step, and how often: a percentile of each layer, or the flag of its
input, whose stage had its first backward in the step before."""
DRAW = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(4, 3, 9, 9, generator=DRAW), torch.randint(10, (4,), generator=DRAW)) for _ in range(4)]
IMAGES = [images for images, _ in BATCHES]


def register(library: str) -> None:
    """Make the device known to torch, and copies of its tensors possible."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(OTHER)
    module: Any = types.ModuleType(f"torch.{OTHER}")
    module.is_available, module.device_count, module.current_device = (lambda: True), (lambda: 1), (lambda: 0)
    module.is_initialized, module._is_in_bad_fork = (lambda: True), (lambda: False)
    module.get_rng_state, module.set_rng_state = (lambda _: torch.get_rng_state()), (lambda state, _: None)
    module.manual_seed_all, module.get_amp_supported_dtype = (lambda _: None), (lambda: [torch.bfloat16])
    torch._register_device_module(OTHER, module)
    kinds: tuple[Any, ...] = Tensor, nn.Parameter
    for kind in kinds:  # torch knows by name the devices whose tensors it copies so
        kind.__deepcopy__ = _copying(kind.__deepcopy__)


def _copying(other: Callable[[Any, dict[int, Any]], Tensor]) -> Callable[[Any, dict[int, Any]], Tensor]:
    def deepcopy(self: Any, memo: dict[int, Any]) -> Tensor:
        if self.device.type != OTHER:
            return other(self, memo)
        if id(self) not in memo:
            data = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=OTHER).copy_(self.detach())
            is_parameter = isinstance(self, nn.Parameter)
            found = nn.Parameter(data, self.requires_grad) if is_parameter else data.requires_grad_(self.requires_grad)
            vars(found).update(vars(self))
            memo[id(self)] = found
        return memo[id(self)]

    return deepcopy


def network(scheme: qconv.Scheme) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Hardtanh()),
        *(qconv.QConv2d(8, 16, 3, padding=1, scheme=scheme), nn.BatchNorm2d(16), nn.Hardtanh()),
        *(qconv.QConv2d(16, 16, 3, stride=2, groups=2, bias=False, scheme=scheme), nn.BatchNorm2d(16), nn.Hardtanh()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), qconv.QLinear(16, 10, scheme=scheme)),
    )


def elsewhere(model: nn.Module) -> list[str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.device.type != OTHER]


def trained(scheme: qconv.Scheme, device: str, lean: bool, dtype: torch.dtype) -> tuple[list[Tensor], int, nn.Module]:
    """The outputs and the parameters of a short training, and the reads of its last step."""
    model: nn.Module = network(scheme).to(device, dtype)
    if lean:
        model = qconv.lean(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    qconv.after_every_step(optimizer, model)
    found, reads = [], 0
    for step, batch in enumerate(BATCHES):
        images, labels = batch[0].to(device, dtype), batch[1].to(device)
        torch.manual_seed(step)
        torch.ops.other.reads()
        output = model(images)
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()
        reads = torch.ops.other.reads()
        qconv.set_progress(model, (step + 1) / len(BATCHES))
        found.append(output.detach())
    found.append(model.eval()(IMAGES[0].to(device, dtype)).detach())
    return [*found, *(parameter.detach() for parameter in model.parameters())], reads, model


def check_training(name: str, lean: bool, dtype: torch.dtype) -> None:
    found, reads, model = trained(METHODS[name], OTHER, lean, dtype)
    assert not elsewhere(model), f"{elsewhere(model)[0]} is not on the device"
    assert reads == READS.get(name, 0), f"{reads} reads in a step"
    expected, _, _ = trained(METHODS[name], "cpu", lean, dtype)
    # After a step in float32, rounding can put a number on the other side of an edge.
    count = 1 if dtype == torch.float32 else len(expected)
    for one, other in zip(found[:count], expected[:count], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-6)


def check_files(scheme: qconv.Scheme) -> None:
    """A model on the device gives the same file, takes one, and is compared with its frozen form there."""
    model = qconv.convert(qconv.models.small_cnn(3, 10), scheme)
    qconv.calibrate(model, IMAGES)
    there = copy.deepcopy(model).to(OTHER).eval()
    with tempfile.TemporaryDirectory() as folder:
        here_file, there_file = Path(folder, "here"), Path(folder, "there")
        qconv.save_packed(model, here_file)
        qconv.save_packed(there, there_file)
        assert here_file.read_bytes() == there_file.read_bytes()
        loaded = qconv.load_packed(there_file, qconv.models.small_cnn(3, 10).to(OTHER)).eval()
    assert not elsewhere(loaded)
    torch.testing.assert_close(loaded(IMAGES[0].to(OTHER)), there(IMAGES[0].to(OTHER)), rtol=1e-4, atol=1e-4)
    frozen = qconv.freeze(there)
    assert qconv.verify(there, frozen, IMAGES[0]).equal
    assert qconv.verify(there, frozen.to(OTHER), IMAGES[0].to(OTHER)).equal


def check_after_training() -> None:
    """Batches are on the CPU, as a loader gives them."""
    floating = qconv.models.small_cnn(3, 10).to(OTHER).eval()
    model = qconv.convert(copy.deepcopy(floating), schemes.minmax(4, 4))
    assert qconv.calibrate(model, BATCHES)
    qconv.correct_bias(model, floating, BATCHES)
    qconv.reconstruct(model, BATCHES, float_model=floating, iterations=2)
    assert qconv.sensitivity(model, BATCHES).rows
    assert not elsewhere(model)
    qconv.assign_bits(
        floating, BATCHES, choices=[schemes.minmax(2, 8), schemes.minmax(8, 8)], max_bytes=10**6, probes=1
    )
    model = qconv.convert(qconv.models.small_cnn(3, 10).to(OTHER), schemes.ewgs(2, 2))
    qconv.calibrate(model, BATCHES)
    assert qconv.set_ewgs_deltas(model, BATCHES[:1], probes=1)


def check_decoding() -> None:
    """The device crops what was decoded: as the CPU does, but for pixels that are rounded the other way."""
    files: list[bytes | DecodingError] = []
    for height, width in (40, 52), (33, 30), (64, 48):
        smooth = nn.functional.interpolate(
            255 * torch.rand(1, 3, 5, 5, generator=DRAW), (height, width), mode="bicubic"
        )
        written = io.BytesIO()
        pixels = smooth[0].clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(written, "JPEG", quality=95)
        files.append(written.getvalue())
    for seed in 0, None:
        batch = Encoded(files, ["", "", ""], [0, 1, 2], [0, 1, 2], 0, Crop(24, 28, seed))
        here, _, _ = batch.decoded(torch.device("cpu"))
        there, labels, problems = batch.decoded(torch.device(OTHER))
        assert (there.device.type, labels.tolist(), problems) == (OTHER, [0, 1, 2], [])
        assert here.float().std() > 20
        assert (there.cpu().int() - here.int()).abs().max() <= 1


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name in METHODS:
        for lean, dtype in (False, torch.float64), (True, torch.float64), (True, torch.float32):
            yield f"{name}, lean={lean}, {dtype}", partial(check_training, name, lean, dtype)
    for scheme in schemes.bnn(), schemes.lsq(4, 4), schemes.shift_q():
        yield f"files of {scheme}", partial(check_files, scheme)
    yield "after training", check_after_training
    yield "decoding", check_decoding


def main() -> None:
    warnings.simplefilter("ignore")
    register(sys.argv[1])
    errors: list[Exception] = []
    for name, check in cases():
        try:
            check()
        except Exception as error:  # noqa: BLE001  # the others are still of interest
            error.add_note(name)
            errors.append(error)
    if errors:
        raise ExceptionGroup("on the other device", errors)


if __name__ == "__main__":
    main()
