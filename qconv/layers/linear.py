"""Quantized linear layer."""

from typing import Any

from torch import Tensor, fx, nn

from ..function.operations import Linear
from ..ground.checks import check_padding_value
from ..scheme import Factory, Scheme
from .arguments import as_node, check_input, chosen
from .base import QuantizedLayer


class QLinear(QuantizedLayer, nn.Linear):
    """`torch.nn.Linear` with quantized weight and input.

    ``output = input_q @ weight_q.T + bias``; shapes ``(*, in_features)`` to ``(*, out_features)``. The arguments are
    as in `torch.nn.Linear`; ``scheme`` is BWN by default. ``padding_value`` has no effect here; it is accepted so
    that all quantized layers can be built alike.

    Raises:
        TypeError: a scheme that is none, or an integer input.
        ValueError: the last dimension of the input is not ``in_features``.
    """

    float_type = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        scheme: Scheme | None = None,
        padding_value: int | None = None,
        grad_quantizer: Factory | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if padding_value is not None:
            check_padding_value(padding_value)
        self.set_scheme(chosen(scheme, grad_quantizer))

    def input_channels(self) -> tuple[int, int]:
        return self.in_features, -1

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_node(self, input)
        check_input(self, input)
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"input has shape {tuple(input.shape)}; its last dimension must be in_features (={self.in_features})"
            )
        # Bits are kept of rows; what is computed for each sample, such as LSQ's gradient of the step, must see samples.
        is_of_rows = not self.input_quantizer.needs_input and self.grad_quantizer is None
        if self.lean is not None and input.ndim > 2 and is_of_rows:
            return self.forward(input.flatten(end_dim=-2)).unflatten(0, input.shape[:-1])
        if not self.has_scale_map:
            return self.apply_op(input, Linear(), self.bias)
        output = self.apply_op(input, Linear(), None)
        output = output * input.abs().mean(-1, keepdim=True).to(output.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)
