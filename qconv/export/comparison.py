"""The comparison of an exported file, in its own runtime, with the trained model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..ground.table import Column, lines, wrap
from ..inference.verify import compared, difference, joined, leaves, tolerance
from ..layers.copies import copied
from ..program.operations import Clamp, Program, Quantize, Sign, as_images
from ..program.planned import run_operation
from .targets import TARGETS, check_images, loaded, program_of, run, settings, target_of

_BATCH = 32
_HEADS = "layer", "codes", "own ≠", "drift", "floats ≠"
_CAUSES = {  # of floats that differ
    **dict.fromkeys(("litert", "executorch"), "; with round_outputs they are rounded to 8 bits"),
    "openvino": "; on x86 processors without VNNI, OpenVINO's sums of 8-bit codes saturate",
}


@dataclass(frozen=True)
class CodesCheck:
    """The codes of one quantizer, or the output.

    Attributes:
        name: of its layer.
        codes: their number.
        own: how many differ from the quantizer's for the floats that the runtime has before it.
        drift: how many differ from those in the frozen model.
        floats: the largest difference of the floats before it from the program's, computed from the runtime's codes.
        largest: the largest of these floats.
    """

    name: str
    codes: int = 0
    own: int = 0
    drift: int = 0
    floats: float = 0.0
    largest: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether codes are those of the floats before them, and rounding explains the difference of these floats."""
        return not self.own and self.floats <= tolerance(self.largest)

    def merged(self, floats: Tensor, wanted: Tensor) -> "CodesCheck":
        """Return the check with more floats."""
        if not wanted.numel():
            return self
        off, most = float(difference(floats, wanted).max()), float(wanted.double().abs().max())
        return replace(self, floats=max(self.floats, off), largest=max(self.largest, most))


@dataclass(frozen=True)
class ExportVerification:
    """The result of `verify_export`; ``print`` shows it as a table.

    Attributes:
        target: the kind of file.
        layers: one for each quantizer whose codes the runtime shows, in the order of the program, then the outputs;
            empty if it shows none.
        decisions: number of images that get another class than from the trained model, in any place where outputs have
            several, or NaN or inf.
        samples: number of images.
        difference: the largest difference of an output from the trained model's.
        largest: the largest output.
        settings: what a user must set in the runtime.
        interpreter: what ran the file, for a target that has several.
    """

    target: str
    layers: tuple[CodesCheck, ...]
    decisions: int
    samples: int
    difference: float
    largest: float
    settings: Mapping[str, str]
    interpreter: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether all layers agree; where the runtime shows no codes, all classes, or outputs within 2^-20 of all."""
        if self.layers:
            return all(layer.agrees for layer in self.layers)
        return not self.decisions or self.difference <= 2**-20 * self.largest

    def text(self, width: int | None = None) -> str:
        """Return the table and the result, in at most `width` columns if possible; None sets no limit."""
        rows = [
            (layer.name, f"{layer.codes:,}", f"{layer.own:,}", f"{layer.drift:,}", f"{layer.floats:.1e}")
            for layer in self.layers
        ]
        table = lines(rows, [Column(head) for head in _HEADS], width) if rows else []
        told = [self._codes()] if rows else []
        by = f" ({self.interpreter})" if self.interpreter else ""
        told.append(
            f"{self.target}{by}: {self.decisions} of {self.samples} predicted classes differ from the trained model's; "
            f"the largest difference of an output is {self.difference:.1e} of {self.largest:.3g}"
        )
        told += [f"the user must set {name} to {value}" for name, value in self.settings.items()]
        return "\n".join([*table, *(line for each in told for line in wrap(each, width or len(each)))])

    def __str__(self) -> str:
        return self.text()

    def _codes(self) -> str:
        total, drift = (sum(getattr(layer, name) for layer in self.layers) for name in ("codes", "drift"))
        for layer in self.layers:
            if layer.own:
                return f"not equal: {layer.own:,} codes of '{layer.name}' are not those of the floats before them"
            if not layer.agrees:
                return (
                    f"not equal: floats before '{layer.name}' differ by {layer.floats:.1e}, more than by the order of "
                    f"sums{_CAUSES.get(self.target, '')}"
                )
        if not drift:
            return f"equal: all {total:,} codes are the frozen model's"
        first = next(layer for layer in self.layers if layer.drift)
        return (
            f"equal: all {total:,} codes are those of the floats before them; {drift:,} differ from the frozen "
            f"model's, since floats rounded in another order fell on the other side of an edge, first in '{first.name}'"
        )


@torch.no_grad()
def verify_export(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    images: Tensor,
    *,
    interpreter: str | None = None,
) -> ExportVerification:
    """Run an exported file in its own runtime, and compare it with the trained model.

    The model is frozen, and compared with the trained one. Each code of the runtime must be that of its quantizer for
    the floats that the runtime itself has before it. Runtimes add floats in different orders, so floats of unquantized
    layers and shortcuts differ by rounding, and codes at an edge can fall to the other side: these are counted, too.

    Args:
        model: the trained model, or what `qconv.load` takes.
        path: of the exported file.
        images: typical images (N, C, H, W), signals (N, C, L) or rows (N, C).
        interpreter: for LiteRT: "xnnpack", as on phones, the default; "builtin", kernels without XNNPACK; "micro",
            LiteRT for Microcontrollers, which has other kernels.

    Raises:
        ImportError: the runtime is missing; it names the extra that installs it.
        TypeError: `images` is not a float tensor of these shapes.
        ValueError: the file is missing, damaged, of no target, or of another model; it takes no such images; its target
            does not have the interpreter, or the interpreter refuses it.
    """
    check_images(images)
    path, model = Path(path), loaded(model)
    target = target_of(path)
    interpreters = TARGETS[target].interpreters
    if interpreter is not None and interpreter not in interpreters:
        rule = f"must be one of {', '.join(interpreters)}" if interpreters else "is for LiteRT files"
        raise ValueError(f"interpreter (={interpreter!r}) {rule}: {path} is of {target}")
    if interpreter is None and interpreters:
        interpreter = interpreters[0]
    images = images.detach().float().cpu()
    program = program_of(model, images[:_BATCH])[1] if TARGETS[target].has_codes else None
    trained = copied(model).eval().cpu()
    checks: dict[int, CodesCheck] = {}
    runs: list[tuple[list[Tensor], list[Tensor]]] = []
    for batch in images.split(_BATCH):
        wanted = leaves(trained(batch))
        outputs, found = run(path, batch, interpreter)
        if [each.numel() for each in outputs] != [each.numel() for each in wanted]:
            got, needed = ([tuple(each.shape) for each in several] for several in (outputs, wanted))
            raise ValueError(f"exported file {path}: gives {got}, not {needed}")
        runs.append(([each.view(other.shape) for each, other in zip(outputs, wanted, strict=True)], wanted))
        if program is not None:
            _check(checks, program, as_images(batch), found, runs[-1][0])
    outputs, wanted = map(joined, zip(*runs, strict=True))
    others, _, difference, largest = compared(outputs, wanted, len(images))
    return ExportVerification(
        target,
        tuple(checks.values()),
        int(others.sum()),
        len(images),
        difference,
        largest,
        settings(path),
        interpreter,
    )


def _check(
    checks: dict[int, CodesCheck],
    program: Program,
    images: Tensor,
    found: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
) -> None:
    """Add a batch: the program goes on with the codes of the runtime, so each layer is compared for itself."""
    own: list[Tensor] = []
    for number, (operation, value) in enumerate(
        zip(program.operations, program.values(images, run_operation), strict=True)
    ):
        result = run_operation(operation, *(own[place] for place in operation.inputs)) if operation.inputs else value
        if isinstance(operation, Quantize | Sign):
            if f"{number}.codes" not in found:
                raise ValueError(f"the file has no codes of '{operation.origin}': it is of another model")
            zero = operation.zero if isinstance(operation, Quantize) else 0
            codes = found[f"{number}.codes"] + zero
            # A kernel from codes to codes shows no floats: these are the program's, from exact sums of its codes.
            floats = found.get(f"{number}.input", own[operation.inputs[0]])
            given = program.operations[operation.inputs[0]]
            clamped = given.run(floats) if isinstance(given, Clamp) else floats  # QONNX needs none before a quantizer
            before = checks.get(number, CodesCheck(operation.origin)).merged(clamped, own[operation.inputs[0]])
            checks[number] = replace(
                before,
                codes=before.codes + codes.numel(),
                own=before.own + int((operation.run(floats.contiguous()) != codes).sum()),
                drift=before.drift + int((value != codes).sum()),
            )
            result = codes
        own.append(result)
    for number, (name, place, output) in enumerate(zip(program.names(), program.outputs, outputs, strict=True)):
        last = len(program.operations) + number
        checks[last] = checks.pop(last, CodesCheck(name)).merged(output, own[place].view(output.shape))
