"""`qconv.Diagnostics`: the figures of a training loop, of its layers and its epochs."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ground.checks import check_module, some
from ..ground.extras import needed
from ..ground.table import write_csv
from ..layers import QuantizedLayer
from ..layers.bypassed import run
from ..layers.observed_run import as_written
from ..layers.twins import quantized_layers
from ..loop.optimizer_step import innermost
from ..optim.oscillations import FREQUENCY, FROZEN, OFTEN
from ..quantizers import INQ
from ..runs.curves import draw_curves
from ..runs.diagnostics_figure import draw_diagnostics
from ..runs.run_files import DIAGNOSTICS, METRICS


class Diagnostics:
    """What `qconv train` records of a training, for a loop of your own: the figures of each epoch and of each layer.

    Make it before the first step, call `step` after each epoch, and `save` when you like; with several processes in the
    first of them alone. A warning names layers that no longer learn: none of their weights, or of the inputs seen, has
    a gradient.

    Attributes:
        curves: a row for each epoch: epoch, and the figures that `step` was given.
        rows: a row for each epoch and layer: epoch, layer, the shares ``flip_rate``, ``weights_never_flipped``,
            ``weights_saturated``, ``weight_error``, ``weights_oscillating``, ``weights_frozen``, ``inputs_saturated``,
            ``inputs_dead``, ``input_error``, and ``step``, the mean scale of the weight's codes if there are codes. An
            element is saturated if its quantizer's pseudo-gradient of a gradient of ones is 0.

    Args:
        model: a converted model.

    Raises:
        TypeError: ``model`` is not a module.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module(model)
        self.model, self.layers = model, quantized_layers(model)
        self.curves: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.levels = {name: levels_of(layer) for name, layer in self.layers.items()}
        self.flipped = {name: torch.zeros_like(levels, dtype=torch.bool) for name, levels in self.levels.items()}
        self.of_inputs: dict[str, dict[str, float]] = {}
        self.told: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: run the model on one batch in it, and the next `step` has figures of the layers' inputs."""
        inputs: dict[str, Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_written())  # hooks would make a compiled network compile once more
            for name, layer in self.layers.items():
                keep = lambda _, args, name=name: inputs.update({name: args[0].detach()})  # noqa: E731
                stack.enter_context(layer.register_forward_pre_hook(keep))
            yield
        # by the quantizers of this batch: in a validation they may be averages of those in training
        self.of_inputs = {name: of_input(layer, inputs.get(name)) for name, layer in self.layers.items()}

    def step(
        self,
        example: Any = None,
        *,
        epoch: int | None = None,
        optimizers: Iterable[Optimizer] = (),
        **figures: float | Tensor,
    ) -> list[dict[str, Any]]:
        """End an epoch: add a row for each layer, and one of the loop's own figures. Return the rows of the layers.

        Args:
            example: a validation batch, for the figures of the inputs: an input of the model, a tuple of its arguments,
                or a dictionary of them. The model is run once, in evaluation.
            epoch: its number; None means the next.
            optimizers: those of the weights; they know which weights oscillate, if `qconv.optim.Oscillations` is used.
            figures: ``train_loss``, ``train_accuracy``, ``val_loss`` and ``val_accuracy`` (shares) are drawn; any other
                is a column of `metrics.csv`.
        """
        number = 1 + max((row["epoch"] for row in (*self.curves, *self.rows)), default=-1) if epoch is None else epoch
        if example is not None:
            with self.recording():
                run(self.model, self.layers.values(), example)
        if figures:
            numbers = {name: x.item() if isinstance(x, Tensor) else float(x) for name, x in figures.items()}
            self.curves.append({"epoch": number, **numbers})
        rows = [{"epoch": number, "layer": name, **self._measured(name, optimizers)} for name in self.layers]
        self.rows += rows
        self._tell_of_stopped(number, rows)
        return rows

    def save(self, folder: str | Path) -> None:
        """Write `metrics.csv`, `curves.png`, `diagnostics.csv` and `diagnostics.png`, each if there are rows.

        Raises:
            ImportError: Matplotlib is missing. The CSV files are written.
        """
        folder = Path(folder)
        for rows, name in ((self.curves, METRICS), (self.rows, DIAGNOSTICS)):
            if rows:
                write_csv(rows, folder / name)
        with needed("qconv.Diagnostics.save"):
            if self.curves:
                draw_curves(self.curves, folder / "curves.png")
            if self.rows:
                draw_diagnostics(self.rows, folder / "diagnostics.png")

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, the weights that changed their level, and the levels at the start of the epoch."""
        return {"curves": self.curves, "rows": self.rows, "flipped": self.flipped, "levels": self.levels}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.curves, self.rows = list(state_dict.get("curves", ())), list(state_dict["rows"])
        for kept, loaded in ((self.flipped, state_dict["flipped"]), (self.levels, state_dict["levels"])):
            kept.update((name, tensor.to(kept[name].device)) for name, tensor in loaded.items())

    def _measured(self, name: str, optimizers: Iterable[Optimizer]) -> dict[str, float]:
        layer = self.layers[name]
        levels = levels_of(layer)
        changed = levels != self.levels[name]
        self.flipped[name] |= changed
        self.levels[name] = levels
        return {
            "flip_rate": share(changed),
            "weights_never_flipped": share(~self.flipped[name]),
            **of_weight(layer),
            **of_steps(layer, optimizers),
            **self.of_inputs.pop(name, {}),
        }

    def _tell_of_stopped(self, epoch: int, rows: Iterable[dict[str, Any]]) -> None:
        rows = [row for row in rows if self.layers[row["layer"]].is_trained]
        for figure, part in (("weights_saturated", "weights"), ("inputs_saturated", "inputs")):
            names = [row["layer"] for row in rows if row.get(figure) == 1 and (figure, row["layer"]) not in self.told]
            if figure == "weights_saturated":  # INQ freezes them
                names = [name for name in names if not isinstance(self.layers[name].weight_quantizer.at_work, INQ)]
            self.told |= {(figure, name) for name in names}
            if names:
                shown = some([f"'{name}'" for name in names], 3)
                warnings.warn(
                    f"epoch {epoch}: no gradient passes the {part} of {shown}: all lie beyond the quantizer's range. "
                    "If a learned range has left them, give quantizers a hundredth of the learning rate: "
                    "qconv.parameter_groups, or ++optimizer.rules.quantizers.lr_scale=0.01",
                    stacklevel=3,
                )


@torch.no_grad()
def levels_of(layer: QuantizedLayer) -> Tensor:
    """Return the level of each weight: its code, or the quantized weight if there are no codes."""
    try:
        return layer.from_filters(layer.weight_codes().values)
    except TypeError:
        return layer.quantized_weight().clone()  # it may be the weight itself


@torch.no_grad()
def of_weight(layer: QuantizedLayer) -> dict[str, float]:
    """Saturation, error and step of a weight."""
    figures: dict[str, float] = {}
    if not layer.weight_quantizer.replaces_weight:
        with layer.as_evaluated() as (quantizer, filters):
            grad = quantizer.backward(torch.ones_like(filters), filters, *quantizer.tensors())[0]
            figures["weights_saturated"] = share(grad == 0) if grad is not None else 0.0
            figures["weight_error"] = error(layer.quantized_weight(), layer.weight)
    with contextlib.suppress(TypeError):  # real numbers have no codes
        figures["step"] = float(layer.weight_codes().scale.float().mean())
    return figures


def of_steps(layer: QuantizedLayer, optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Figures of the weight from `qconv.optim.Oscillations`, if the run has this rule."""
    figures: dict[str, float] = {}
    for optimizer in map(innermost, optimizers):
        state = optimizer.state.get(layer.weight, {})
        if FREQUENCY in state:
            figures["weights_oscillating"] = share(state[FREQUENCY] > OFTEN)
        if FROZEN in state:
            figures["weights_frozen"] = share(state[FROZEN] > 0)
    return figures


@torch.no_grad()
def of_input(layer: QuantizedLayer, input: Tensor | None) -> dict[str, float]:
    """Saturation, dead channels and error of the inputs that a layer has received."""
    if input is None or input.numel() == 0:
        return {}
    quantizer = layer.input_quantizer
    tensors = quantizer.tensors()
    input_q = quantizer.quantize(input, *tensors)
    grad = quantizer.backward(torch.ones_like(input), input, *tensors)[0]
    channels = input_q.movedim(layer.input_channels()[1], 0).flatten(1)
    return {
        "inputs_saturated": share(grad == 0) if grad is not None else 0.0,
        "inputs_dead": share((channels == channels[:, :1]).all(1)),
        "input_error": error(input_q, input),
    }


def share(flags: Tensor) -> float:
    """The share of elements that are True."""
    return float(flags.float().mean()) if flags.numel() else 0.0


def error(x_q: Tensor, x: Tensor) -> float:
    """``min_s ‖s·x_q − x‖² / ‖x‖² = 1 − cos²``, 0 if x is 0: the next batch norm cancels a wrong scale."""
    cosine = torch.nn.functional.cosine_similarity(x_q.flatten().float(), x.flatten().float(), dim=0)
    return float(1 - cosine.square()) if x.any() else 0.0
