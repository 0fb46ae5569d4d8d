"""The namespace of qconv's operators, `torch.ops.qconv`."""

import torch

LIBRARY = torch.library.Library("qconv", "DEF")
Scaled = tuple[torch.Tensor, torch.Tensor] | None
"""The scale and the bias of each output channel, float32, for the sums of a convolution; None leaves them whole."""
