"""The namespace of qconv's operators, `torch.ops.qconv`."""

import torch

LIBRARY = torch.library.Library("qconv", "DEF")
