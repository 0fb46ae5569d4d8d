"""Running ONNX files in ONNX Runtime."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..ground.checks import some
from ..ground.extras import needed
from ..inference.defaults import of_shipping
from ..inference.verify import compared, joined, leaves
from ..layers.copies import copied

# What a file says of itself: whether it rounds outputs, and the names of `OnnxComparison.saturating`, a line each.
ROUNDED, SATURATING = "qconv.round_outputs", "qconv.saturating_layers"
PRECISE = ("session.x64quantprecision", "1")
"""ONNX Runtime's option for right sums of 8-bit codes on x86 processors without VNNI. With VNNI sums are right without
it, and slower with it."""


class OnnxModel:
    """A file of `qconv.export_onnx`, run by ONNX Runtime on the CPU, with exact sums on every processor.

    Args:
        path: the file.
        threads: number of threads; None means as many as torch uses.

    Raises:
        ImportError: ONNX Runtime is missing: ``pip install "qconv[onnx]"``.
        ValueError: the file is missing, or ONNX Runtime can't load it.
    """

    def __init__(self, path: str | os.PathLike[str], threads: int | None = None) -> None:
        if not Path(path).is_file():
            raise ValueError(f"ONNX file {path}: there is no such file")
        threads = torch.get_num_threads() if threads is None else threads
        has_vnni = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_vnni", "avx_vnni"))
        self.session = load(str(path), threads, optimized=has_vnni)  # without VNNI it only tells what the file says
        said = self.session.get_modelmeta().custom_metadata_map
        self.is_rounded = said.get(ROUNDED) == "true"
        self.saturating = tuple(said.get(SATURATING, "").splitlines())
        if not has_vnni:
            self.session = load(str(path), threads, precise=bool(self.saturating))
        self.input = self.session.get_inputs()[0].name
        self.names = [output.name for output in self.session.get_outputs()]

    def __call__(self, input: Tensor) -> Any:
        """Return the output for a batch, of several a dict; raise a ValueError if the input has the wrong kind."""
        try:
            outputs = self.session.run(None, {self.input: input.detach().float().cpu().contiguous().numpy()})
        except Exception as error:  # its own kinds
            raise ValueError(f"input (of shape {tuple(input.shape)}): {' '.join(str(error).split())}") from error
        named = dict(zip(self.names, map(torch.from_numpy, outputs), strict=True))
        return named if len(named) > 1 else named.popitem()[1]


def load(file: str | bytes, threads: int, *, precise: bool = False, optimized: bool = True) -> Any:
    """Return a session of ONNX Runtime for a path or a file's content; raise a ValueError if there is none."""
    with needed("running ONNX files"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what it would print is raised
    options.add_session_config_entry("session.force_spinning_stop", "1")  # leaves the cores to others between runs
    if precise:
        options.add_session_config_entry(*PRECISE)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own kinds, which it does not export
        name = f"ONNX file {file}" if isinstance(file, str) else "the ONNX file"
        raise ValueError(f"{name}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class OnnxComparison:
    """The result of `compare_onnx`.

    Attributes:
        is_rounded: whether the file rounds outputs to 8 bits.
        close: number of inputs with outputs equal up to the order of float sums; in the others some code crossed an
            edge.
        difference: the largest difference of an output.
        largest: the largest output.
        decisions: number of inputs that get another class (with one output: another sign), in any place where outputs
            have several, or NaN or inf.
        samples: number of inputs.
        saturating: the layers whose sums ONNX Runtime may get wrong on x86 processors without VNNI, if its option
            ``session.x64quantprecision`` is not set, as `OnnxModel` does there.
    """

    is_rounded: bool
    close: int
    difference: float
    largest: float
    decisions: int
    samples: int
    saturating: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether all predicted classes agree."""
        return self.decisions == 0

    def __str__(self) -> str:
        rounded = ", outputs rounded to 8 bits" if self.is_rounded else ""
        return (
            f"{self.decisions} of {self.samples} predicted classes differ{rounded}; {self.close} of {self.samples} "
            f"outputs are equal within rounding; the largest difference is {self.difference:.1e} of {self.largest:.3g}"
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        if not self.saturating:
            return ""
        names = some([f"'{name}'" for name in self.saturating], 3)
        return (
            f"; on x86 processors without VNNI, sums of 8-bit codes can saturate in {names} unless "
            f"{PRECISE[0]} is {PRECISE[1]}"
        )


@torch.no_grad()
@of_shipping()
def compare_onnx(model: nn.Module, path: str | os.PathLike[str], inputs: Tensor) -> OnnxComparison:
    """Compare a file's outputs in ONNX Runtime with the trained model's, in evaluation on the CPU.

    Raises:
        ImportError: ONNX Runtime is missing.
        ValueError: the file can't be loaded, or gives outputs of another shape; no input.
    """
    if not len(inputs):
        raise ValueError("inputs must hold at least one sample")
    trained, runtime = copied(model).eval().cpu(), OnnxModel(path)
    inputs = inputs.detach().float().cpu()
    batches = inputs.split(64)
    wanted, got = (joined(leaves(run(batch)) for batch in batches) for run in (trained, runtime))
    shapes = [[tuple(each.shape) for each in outputs] for outputs in (got, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"ONNX file {path}: gives {shapes[0]}, the model {shapes[1]}")
    others, is_close, difference, largest = compared(got, wanted, len(inputs))
    counts = int(is_close.sum()), difference, largest, int(others.sum()), len(inputs)
    return OnnxComparison(runtime.is_rounded, *counts, runtime.saturating)
