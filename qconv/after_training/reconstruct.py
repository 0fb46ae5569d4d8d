"""Quantization after training: the rounding of weights is learned, block by block, from pictures without labels."""

import copy
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..checks import check_numbers, check_whole
from ..layers import QuantizedLayer
from ..layers.computed import computed_by
from ..layers.naming import name_of
from ..layers.origin import leave
from ..layers.own_levels import has_unit_steps, way_out, why_off_levels
from ..layers.trial import check_not_inference, trial
from ..layers.twins import float_twins, quantized_layers
from ..processes import check_alone
from ..progress import shown
from ..quantizers import Identity
from ..table import Column, lines, write_csv
from .sensitivity import batches_of, calibrate_what_waits, float_but

STRETCH = (-0.1, 1.1)
"""The ends of AdaRound's rectified sigmoid."""
BETA = (20.0, 2.0)
"""The exponent of its regularization at the start and at the end."""
WARM_UP = 0.2
"""The share of the iterations without regularization."""
COLUMNS = (
    Column("block"),
    *(Column(head, is_right=True) for head in ("layers", "before", "after", "not to nearest")),
)


@dataclass(frozen=True)
class Block:
    """What `reconstruct` has done to a block.

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
    """The blocks in the order of their calls; ``str`` of it is a table.

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
    r"""Learn how the weights of a converted model are rounded, without labels and without training it.

    AdaRound (arXiv:2004.10568), for blocks of layers as in BRECQ (arXiv:2102.05426). Block after block, in the order in
    which the model calls them, each weight is rounded up or down so that the block, which gets its inputs from the
    quantized blocks before it, gives the outputs of the float model:

    .. math::

        \min_V \lVert f(x_q; \tilde w) - f(x; w) \rVert^2 + \lambda \sum (1 - |2 h(V) - 1|^\beta), \qquad
        \tilde w = s \operatorname{clamp}(\lfloor w / s \rfloor + h(V), l, u)

    with :math:`h(V) = \operatorname{clamp}(1.2 \, \sigma(V) - 0.1, 0, 1)`. The second term, without effect in the first
    fifth of the iterations, drives h to 0 or 1 as β falls from 20 to 2. The norm is summed over channels, and averaged
    over samples and places. Learned ranges of inputs (LSQ's steps) are learned further, at their own rate.

    The weights that were found replace the latent ones: each lies on its level. Nothing else is stored, so that the
    model is saved, frozen, exported and trained as any other. Batch norms and biases stay.

    Without ``float_model``, that is the network of the latent weights with the biases and batch norms of ``model``:
    another one than was trained, if it was trained with quantized weights, if `correct_bias` has changed it, or if its
    weights lie on levels since an earlier call. Weights that are frozen (``requires_grad=False``) are rounded, too.
    Weights that lie on a level stay there: a second call learns no rounding, and warns; the ranges of inputs go on.

    A block is a module that is neither a quantized layer nor ``nn.Sequential``, ``nn.ModuleList`` or
    ``nn.ModuleDict``, and holds quantized layers, below the model itself, such as a residual block; a quantized layer
    outside such modules is one of its own.

    Args:
        model: converted by a scheme of evenly spaced levels for the weights, such as `schemes.lsq` and
            `schemes.minmax`; it is changed in place. What is not calibrated yet is calibrated on ``images``.
        images: a tensor of samples, or batches, from a DataLoader, for example; labels are not used.
        float_model: the trained model from which ``model`` was converted, whose outputs are to be kept: a copy, as
            `qconv.convert` changes its model. Weights are rounded from where they are in ``model``.
        iterations: steps of Adam for each block; the papers take 10,000 and 20,000.
        batch_size: samples in a step.
        learning_rate: of V. The papers' is 0.001, with more iterations.
        input_learning_rate: of learned ranges of inputs.
        regularization: λ.
        max_samples: the number of samples that are used; their inputs and outputs of a block are kept in memory.
        seed: of the order of the samples.

    Returns:
        The error of each block before and after.

    Raises:
        ValueError: a ``model`` that is float; a ``float_model`` that is not, or lacks layers of ``model`` or does not
            call its blocks; no samples, or an option out of its range.
        TypeError: a weight whose levels are not evenly spaced, or that is normalized before it is quantized; a weight
            that is shared, computed (pruned, parametrized) or of 16 bits; a wrapper such as DataParallel; a block that
            takes or returns anything but one tensor, or is called twice.
        RuntimeError: several processes, which would round differently; `torch.inference_mode`.
    """
    for name, value in {"iterations": iterations, "batch_size": batch_size, "max_samples": max_samples}.items():
        if check_whole(name, value) < 1:
            raise ValueError(f"{name} (={value}) must be at least 1")
    rates = {"learning_rate": learning_rate, "input_learning_rate": input_learning_rate}
    for name, value in {**rates, "regularization": regularization}.items():
        check_numbers(**{name: value})
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} (={value}) must be at least 0 and finite")
    check_not_inference("reconstruct needs gradients")
    check_alone("reconstruct")
    batches = list(batches_of(images, None, batch_size, max_samples))
    if not batches:
        raise ValueError("images must hold at least one sample")
    _check_unwrapped(model)
    layers = quantized_layers(model)
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) is float: convert it first, with qconv.schemes.lsq(4, 8)")
    for name, layer in layers.items():
        _check_levels(name, layer)
    if float_model is not None:
        float_twins(layers, float_model)
    owners: dict[Tensor, str] = {}
    for name, layer in layers.items():
        if (other := owners.setdefault(layer.weight, name)) != name:
            raise TypeError(f"{other} and {name} share a weight: its rounding can't suit both")
    mode = {module: module.training for module in model.modules()}
    model.eval()
    try:
        calibrate_what_waits(model, batches)
        _warn_if_on_levels(layers)
        pictures = [images for images, _ in batches]
        blocks = _called(model, dict(_below(model, "")), pictures[0][:1])
        _check_apart(blocks)
        reference = copy.deepcopy(model) if float_model is None else float_model
        if float_model is not None:
            _check_blocks(float_model, blocks, pictures[0][:1])
        generator = torch.Generator().manual_seed(seed)
        options = _Options(iterations, batch_size, learning_rate, input_learning_rate, regularization)
        rows = []
        for name, block in shown(list(blocks.items()), "reconstruct", len(blocks)):
            with float_but(_layers(reference)):
                _, target = _seen(reference, name, pictures)
            input, before = _seen(model, name, pictures)
            moved = _reconstruct(block, input, target, options, generator)
            _, after = _seen(model, name, pictures)
            rows.append(Block(name, len(_layers(block)), _error(before, target), _error(after, target), moved))
    finally:
        for module, was in mode.items():
            module.training = was
    return Reconstruction(tuple(rows), sum(map(len, pictures)))


@dataclass(frozen=True)
class _Options:
    iterations: int
    batch_size: int
    learning_rate: float
    input_learning_rate: float
    regularization: float


def _layers(module: nn.Module) -> list[QuantizedLayer]:
    return [each for each in module.modules() if isinstance(each, QuantizedLayer)]


def _check_unwrapped(model: nn.Module) -> None:
    """Raise if the whole network is the only child of a wrapper, and would be taken for one block."""
    if isinstance(model, DataParallel | DistributedDataParallel | AveragedModel) or "_orig_mod" in model._modules:
        place = "._orig_mod" if "_orig_mod" in model._modules else ".module"
        raise TypeError(f"model ({type(model).__name__}) is a wrapper: give the network in it, {place}")


def _check_levels(name: str, layer: QuantizedLayer) -> None:
    if maker := computed_by(layer):
        raise TypeError(f"the rounding of {name_of(layer, name)} can't be learned: {maker}")
    if torch.finfo(layer.weight.dtype).bits < 32:
        raise TypeError(
            f"{name}.weight is {layer.weight.dtype}, which can't resolve the steps of the learning: call model.float()"
        )
    why = why_off_levels(layer) or ("" if has_unit_steps(layer) else "its levels are not evenly spaced around 0")
    if why:
        remedy = way_out(layer, name, "take schemes.lsq with at least 2 bits, or schemes.minmax with symmetric weights")
        raise TypeError(f"the rounding of {name}.weight with {layer.scheme} can't be learned: {why}; {remedy}")


def _warn_if_on_levels(layers: Mapping[str, QuantizedLayer]) -> None:
    """Warn of layers of whose rounding there is nothing to learn."""
    settled = [name_of(layer, name) for name, layer in layers.items() if bool(_Rounding(layer).on_level.all())]
    if settled:
        more = f" and {len(settled) - 1} more" if settled[1:] else ""
        warnings.warn(
            f"all weights of {settled[0]}{more} lie on levels already, so their rounding can't be learned again: "
            "convert a copy of the float model, and reconstruct that",
            stacklevel=3,
        )


def _called(model: nn.Module, blocks: Mapping[str, nn.Module], sample: Tensor) -> dict[str, nn.Module]:
    """Return those of the blocks that ``model`` calls, in the order of their calls."""
    called: list[str] = []

    def note(name: str):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
                raise TypeError(f"{name} ({type(module).__name__}) must take one tensor and return one, to be a block")
            if name in called:
                raise TypeError(f"{name} ({type(module).__name__}) is called twice: its calls have inputs of their own")
            called.append(name)

        return hook

    handles = [block.register_forward_hook(note(name), with_kwargs=True) for name, block in blocks.items()]
    try:
        with trial(model):
            model(sample)
    finally:
        for handle in handles:
            handle.remove()
    first: dict[nn.Module, str] = {}  # one block may have two names
    return {first.setdefault(blocks[name], name): blocks[name] for name in called}


def _check_blocks(float_model: nn.Module, blocks: Iterable[str], sample: Tensor) -> None:
    """Raise unless the float model calls all blocks, so that each has outputs to be kept."""
    called = _called(float_model, {name: float_model.get_submodule(name) for name in blocks}, sample)
    if left_out := [name for name in blocks if name not in called]:
        raise ValueError(f"float_model ({type(float_model).__name__}) must call {left_out[0]}, as model does")


def _below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, QuantizedLayer):  # the model itself
        yield prefix, module
        return
    for name, child in module.named_children():
        whole = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _below(child, whole)
        elif _layers(child):
            yield whole, child


def _check_apart(blocks: Mapping[str, nn.Module]) -> None:
    """Raise a TypeError for a layer in two blocks: the second would change what the first has found."""
    owners: dict[QuantizedLayer, str] = {}
    for name, block in blocks.items():
        for layer in _layers(block):
            if (other := owners.setdefault(layer, name)) != name:
                raise TypeError(f"{other} and {name} share {name_of(layer)}: its rounding can't suit both")


class _EnoughError(Exception):
    """Ends a forward behind the block that is looked at."""


def _seen(model: nn.Module, name: str, pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the inputs and outputs of a block for these pictures."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        inputs.append(args[0].clone())  # the block may write to it

    def behind(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del module, args
        outputs.append(output)
        raise _EnoughError

    block = model.get_submodule(name)
    handles = block.register_forward_pre_hook(before), block.register_forward_hook(behind)
    try:
        with trial(model):
            for images in pictures:
                try:
                    model(images)
                except _EnoughError:
                    continue
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(inputs), torch.cat(outputs)


class _Rounding:
    """The weight of one layer between the levels below and above it.

    Attributes:
        logits: V.
        on_level: which weights lie on a level; they stay there.
    """

    def __init__(self, layer: QuantizedLayer) -> None:
        self.layer = layer
        codes = layer.weight_codes()
        self.scale = codes.scale.detach()
        self.low, self.high = layer.weight_quantizer.whole_ends or (0, 0)
        with layer.as_evaluated() as (_, filters):
            filters = filters.detach()
        place = torch.where(self.scale > 0, filters / self.scale, torch.zeros_like(filters))
        place = torch.where((place - place.round()).abs() < 1e-3, place.round(), place)  # it lies on a level
        place = place.clamp(self.low, self.high)
        self.nearest = codes.values - codes.zero
        self.floor = place.floor()
        self.on_level = place == self.floor
        stretched = (place - self.floor - STRETCH[0]) / (STRETCH[1] - STRETCH[0])
        self.logits = stretched.logit().requires_grad_()

    def up(self) -> Tensor:
        """h, the share of the level above."""
        low, high = STRETCH
        return (self.logits.sigmoid() * (high - low) + low).clamp(0, 1).masked_fill(self.on_level, 0)

    def weight(self) -> Tensor:
        """The weight between its levels, in the layout of the layer."""
        return self.layer.from_filters(self.scale * (self.floor + self.up()).clamp(self.low, self.high))

    @torch.no_grad()
    def finish(self) -> int:
        """Put the latent weights on their levels; return how many are not on the nearest one."""
        leave(self.layer)  # or the learned scale would follow the weight
        whole = (self.floor + (self.up() >= 0.5)).clamp(self.low, self.high)
        self.layer.weight.copy_(self.layer.from_filters(self.scale * whole))
        return int((whole != self.nearest).sum())


@contextmanager
def _open(block: nn.Module) -> Iterator[dict[str, _Rounding]]:
    """Let the layers of a block take a weight as it is given, and yield the roundings by the weights' names."""
    layers = {name: each for name, each in block.named_modules() if isinstance(each, QuantizedLayer)}
    roundings = {f"{name}.weight" if name else "weight": _Rounding(each) for name, each in layers.items()}
    quantizers = {layer: layer.weight_quantizer for layer in layers.values()}
    for layer in quantizers:
        layer.weight_quantizer = Identity()
    try:
        yield roundings
    finally:
        for layer, quantizer in quantizers.items():
            layer.weight_quantizer = quantizer


def _reconstruct(
    block: nn.Module, input: Tensor, target: Tensor, options: _Options, generator: torch.Generator
) -> float:
    """Learn the rounding of a block's weights, and apply it; return the share of weights that it changes."""
    ranges = [each for layer in _layers(block) for each in layer.input_quantizer.parameters() if each.requires_grad]
    was = {each: each.requires_grad for each in block.parameters()}
    for each in was:
        each.requires_grad_(False)
    try:
        with _open(block) as roundings, torch.enable_grad():
            for each in ranges:
                each.requires_grad_()
            groups: list[dict[str, Any]] = [
                {"params": [rounding.logits for rounding in roundings.values()], "lr": options.learning_rate},
                {"params": ranges, "lr": options.input_learning_rate},
            ]
            optimizer = torch.optim.Adam([group for group in groups if group["params"]])
            feature_dim = _feature_dim(block, input[:1])
            for step in range(options.iterations):
                batch = torch.randint(0, len(input), (min(options.batch_size, len(input)),), generator=generator)
                weights = {name: rounding.weight() for name, rounding in roundings.items()}
                output = functional_call(block, weights, (input[batch],))
                distance = (output - target[batch]).square()
                regularization = options.regularization * _regularization(roundings, step, options)
                loss = distance.sum(feature_dim).mean() + regularization
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for layer in _layers(block):
                        layer.input_quantizer.after_step_(None)
        moved = sum(rounding.finish() for rounding in roundings.values())
    finally:
        for each, required in was.items():
            each.requires_grad_(required)
            each.grad = None
    return moved / max(sum(rounding.logits.numel() for rounding in roundings.values()), 1)


@torch.no_grad()
def _feature_dim(block: nn.Module, sample: Tensor) -> int:
    """Return the dimension of a block's channels: the last one of what a linear layer returns, as of tokens."""
    last: list[Any] = [None, None]

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del args
        last[:] = module, output.shape

    handles = [layer.register_forward_hook(note) for layer in _layers(block)]
    try:
        output = block(sample.clone())
    finally:
        for handle in handles:
            handle.remove()
    return -1 if isinstance(last[0], nn.Linear) and last[1] == output.shape else 1


def _regularization(roundings: dict[str, _Rounding], step: int, options: _Options) -> Tensor | float:
    """``Σ (1 − |2h − 1|^β)``; 0 while the rounding warms up."""
    start = WARM_UP * options.iterations
    if step < start:
        return 0.0
    progress = (step - start) / max(options.iterations - start, 1)
    beta = BETA[1] + (BETA[0] - BETA[1]) * (1 - progress)
    return torch.stack([(1 - (2 * each.up() - 1).abs() ** beta).sum() for each in roundings.values()]).sum()


def _error(output: Tensor, target: Tensor) -> float:
    energy = float(target.double().square().sum())
    return float((output - target).double().square().sum()) / max(energy, 1e-300)
