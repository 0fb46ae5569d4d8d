"""Quantization after training: learned rounding of the weights, block by block, from unlabelled images."""

import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..convert.tied import shared_tensor
from ..ground.checks import check_at_least_one, check_module, check_not_negative, check_whole, some
from ..ground.processes import check_alone
from ..ground.progress import shown
from ..ground.table import Column, lines, write_csv
from ..layers import QuantizedLayer
from ..layers.computed import computed_by
from ..layers.copies import copied
from ..layers.naming import name_of
from ..layers.observed_run import check_not_inference, set_modes
from ..layers.on_levels import has_unit_steps, way_out, why_off_levels
from ..layers.twins import float_twins, quantized_layers
from .adaptive_rounding import Rounding, learn_rounding
from .blocks import FEW, called_blocks, check_apart, check_called, layers_of, outputs_for, relative_error, seen_by
from .samples import images_of
from .sensitivity import calibrate_what_waits, float_but

COLUMNS = (
    Column("block"),
    *(Column(head, is_right=True) for head in ("layers", "before", "after", "not to nearest")),
)


@dataclass(frozen=True)
class Block:
    """The result of `reconstruct` for one block.

    Attributes:
        name: of the module.
        layers: the number of its quantized layers.
        before: ``Σ (y_q − y)² / Σ y²`` over its outputs, y those of the float model, with weights rounded to nearest.
        after: the same with the weights that were found.
        moved: the share of weights that are not rounded to their nearest level.
    """

    name: str
    layers: int
    before: float
    after: float
    moved: float


@dataclass(frozen=True, repr=False)
class Reconstruction:
    """The blocks in the order of their calls; prints as a table.

    Attributes:
        rows: the blocks.
        samples: the number of samples that were used.
    """

    rows: tuple[Block, ...]
    samples: int

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a row for each block."""
        write_csv([asdict(row) for row in self.rows], Path(path))

    def __str__(self) -> str:
        cells = [
            (row.name, str(row.layers), f"{row.before:.2%}", f"{row.after:.2%}", f"{row.moved:.1%}")
            for row in self.rows
        ]
        return "\n".join([*lines(cells, COLUMNS), "", f"error of the outputs before and after, {self.samples} samples"])

    def __repr__(self) -> str:
        return f"Reconstruction({len(self.rows)} blocks, {self.samples} samples)"


def reconstruct(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    float_model: nn.Module | None = None,
    iterations: int = 2000,
    batch_size: int = 32,
    learning_rate: float = 1e-2,
    input_learning_rate: float = 4e-5,
    regularization: float = 0.01,
    max_samples: int = 512,
    seed: int = 0,
) -> Reconstruction:
    r"""Learn the rounding of a converted model's weights, without labels and without training it.

    AdaRound (arXiv:2004.10568), for blocks of layers as in BRECQ (arXiv:2102.05426). Block after block, in the order in
    which the model calls them, each weight is rounded up or down so that the block, which gets its inputs from the
    quantized blocks before it, gives the outputs of the float model:

    .. math::

        \min_V \lVert f(x_q; \tilde w) - f(x; w) \rVert^2 + \lambda \sum (1 - |2 h(V) - 1|^\beta), \qquad
        \tilde w = s \operatorname{clamp}(\lfloor w / s \rfloor + h(V), l, u)

    with :math:`h(V) = \operatorname{clamp}(1.2 \, \sigma(V) - 0.1, 0, 1)`. The second term, without effect in the first
    fifth of the iterations, drives h to 0 or 1 as β falls from 20 to 2. The norm is summed over channels, and averaged
    over samples and positions. Learned ranges of inputs (LSQ's step sizes) are learned further, at their own rate.

    The weights that were found replace the latent ones: each lies on its level. Nothing else is stored, so that the
    model is saved, frozen, exported and trained as any other. Batch norms and biases stay.

    Without ``float_model``, that is the network of the latent weights with the biases and batch norms of ``model``:
    another one than was trained, if it was trained with quantized weights, if `correct_bias` has changed it, or if its
    weights lie on levels since an earlier call. Weights that are frozen (``requires_grad=False``) are rounded, too.
    Weights that lie on a level stay there: a second call learns no rounding, and warns; the ranges of inputs go on.

    A block is a module with its own forward (``nn.Sequential`` has none), below the model itself, that holds
    quantized layers, takes one tensor, returns one, and is called once, such as a residual block. A stage or a network
    in a wrapper, which holds several of them in ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``, stands for
    these. A quantized layer in no block is a block itself. The input and output of a block have the samples in
    dimension 0 (batch first).

    Args:
        model: converted by a scheme of evenly spaced levels for the weights, such as `schemes.lsq` and
            `schemes.minmax`; it is changed in place. What is not calibrated yet is calibrated on ``images``.
        images: a tensor of samples, or batches, from a DataLoader, for example, which are moved from the CPU to the
            model's device; labels are not used.
        float_model: the trained model from which ``model`` was converted, whose outputs are to be kept: a copy, as
            `qconv.convert` changes its model. Weights are rounded from where they are in ``model``.
        iterations: steps of Adam for each block; the papers take 10,000 and 20,000.
        batch_size: samples in a step; fewer, but at least 4, of a block whose outputs have more than 2^12 positions in
            them.
        learning_rate: of V. The papers' is 0.001, with more iterations.
        input_learning_rate: of learned ranges of inputs.
        regularization: λ.
        max_samples: the number of samples that are used; their inputs and outputs of a block are kept in memory.
        seed: of the order of the samples.

    Returns:
        The error of each block before and after. A UserWarning names layers that are not called, and stay.

    Raises:
        ValueError: a ``model`` that is float; a ``float_model`` that is not, or lacks layers of ``model`` or does not
            call its blocks; no samples, or an option out of its range.
        TypeError: a weight whose levels are not evenly spaced, or that is normalized before it is quantized; a weight
            that is shared, computed (pruned, parametrized) or of 16 bits; a wrapper such as DataParallel; a batch that
            is no tensor; a layer that is called twice.
        RuntimeError: several processes, which would round differently; `torch.inference_mode`.
    """
    check_module(model)
    if float_model is not None:
        check_module(float_model, "float_model")
    check_at_least_one(iterations=iterations, batch_size=batch_size)
    check_whole("seed", seed)
    rates = {"learning_rate": learning_rate, "input_learning_rate": input_learning_rate}
    options = {**rates, "regularization": regularization}
    check_not_negative(**options)
    check_not_inference("reconstruct needs gradients")
    check_alone("reconstruct")
    pictures = images_of(model, images, FEW, max_samples)
    _check_unwrapped(model)
    layers = quantized_layers(model)
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) is float: convert it first, with qconv.schemes.lsq(4, 8)")
    for name, layer in layers.items():
        _check_levels(name, layer)
    if float_model is not None:
        float_twins(layers, float_model)
    if shared := shared_tensor(model, {name: layer.weight for name, layer in layers.items()}):
        raise TypeError(f"{' and '.join(shared)} share a weight: its rounding can't suit both")
    mode = {module: module.training for module in model.modules()}
    model.eval()
    try:
        calibrate_what_waits(model, pictures)
        _warn_if_on_levels(layers)
        blocks = called_blocks(model, pictures[0])
        check_apart(blocks)
        _warn_if_left_out(layers, blocks.values())
        reference = copied(model) if float_model is None else float_model
        if float_model is not None:
            check_called(float_model, blocks, pictures[0])
        generator = torch.Generator().manual_seed(seed)
        rows = []
        total = len(blocks) * iterations
        with closing(shown(range(total), "reconstruct", total)) as steps:
            for name, block in blocks.items():
                with float_but(layers_of(reference)):
                    _, target = seen_by(reference, name, pictures)
                input, before = seen_by(model, name, pictures)
                moved = learn_rounding(
                    block, input, target, generator, steps, iterations=iterations, batch_size=batch_size, **options
                )
                after = outputs_for(block, input)
                errors = relative_error(before, target), relative_error(after, target)
                rows.append(Block(name, len(layers_of(block)), *errors, moved))
    finally:
        with torch.no_grad():
            set_modes(mode)
    return Reconstruction(tuple(rows), sum(map(len, pictures)))


def _check_unwrapped(model: nn.Module) -> None:
    """Raise if the whole network is the only child of a wrapper, and would become one block."""
    if isinstance(model, DataParallel | DistributedDataParallel | AveragedModel) or "_orig_mod" in model._modules:
        place = "._orig_mod" if "_orig_mod" in model._modules else ".module"
        raise TypeError(f"model ({type(model).__name__}) is a wrapper: pass the network in it, {place}")


def _check_levels(name: str, layer: QuantizedLayer) -> None:
    if maker := computed_by(layer):
        raise TypeError(f"the rounding of {name_of(layer, name)} can't be learned: {maker}")
    if torch.finfo(layer.weight.dtype).bits < 32:
        raise TypeError(f"{name}.weight is {layer.weight.dtype}, too coarse to learn its rounding: call model.float()")
    why = why_off_levels(layer) or ("" if has_unit_steps(layer) else "its levels are not evenly spaced around 0")
    if why:
        remedy = way_out(layer, name, "use schemes.lsq with at least 2 bits, or schemes.minmax with symmetric weights")
        raise TypeError(f"the rounding of {name}.weight with {layer.scheme} can't be learned: {why}; {remedy}")


def _warn_if_left_out(layers: Mapping[str, QuantizedLayer], blocks: Iterable[nn.Module]) -> None:
    """Warn of layers outside all blocks, because the model does not call them."""
    called = {layer for block in blocks for layer in layers_of(block)}
    if left := [f"'{name}'" for name, layer in layers.items() if layer not in called]:
        warnings.warn(
            f"reconstruct: the model did not call {'layer' if len(left) == 1 else 'layers'} {', '.join(left)}: nothing "
            "was learned there",
            stacklevel=3,
        )


def _warn_if_on_levels(layers: Mapping[str, QuantizedLayer]) -> None:
    """Warn of layers without a rounding to learn."""
    settled = [name_of(layer, name) for name, layer in layers.items() if bool(Rounding(layer).on_level.all())]
    if settled:
        warnings.warn(
            f"all weights of {some(settled, 1)} are already on levels, so their rounding can't be learned again: "
            "convert a copy of the float model, and reconstruct that",
            stacklevel=3,
        )
