"""Programs of one function of torch, or of two."""

from typing import Any

import torch
from torch import nn

from qconv.program import operations as ops
from qconv.program.operations import Given, Images, Program

aten = torch.ops.aten
X, HALF = Given(0), torch.linspace(-1, 1, 6).view(6, 1, 1)
WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **{name: (getattr(aten, name).default, X) for name in ("sigmoid", "silu", "tanh", "gelu", "relu", "abs", "exp")},
    **{name: (getattr(aten, name).default, X) for name in ("hardswish", "hardsigmoid", "mish", "softplus", "elu")},
    **{name: (getattr(aten, name).default, X) for name in ("neg", "erf", "floor", "sin", "hardtanh", "leaky_relu")},
    **{
        name: (getattr(aten, name).default, X) for name in ("celu", "hardshrink", "softshrink", "expm1", "atan", "triu")
    },
    "selu": (aten.elu.default, X, 1.6732632, 1.050701),
    "log_sigmoid": (aten.log_sigmoid_forward.default, X, {"result": 0}),
    "softplus beta": (aten.softplus.default, X, 2.0),
    "softplus threshold": (aten.softplus.default, X, 1.0, 0.5),
    "gelu tanh": (aten.gelu.default, X, {"approximate": "tanh"}),
    "clamp": (aten.clamp.default, X, None, 0.5),
    "clamp_min": (aten.clamp_min.default, X, -0.5),
    "clamp to values": (aten.clamp.Tensor, X, HALF, X),
    "times images": (aten.mul.Tensor, X, Images(2)),
    "squeeze": (aten.squeeze.dim, aten.mean, 2),
    "prelu": (aten.prelu.default, X, torch.linspace(-1, 1, 6)),
    "add": (aten.add.Tensor, X, HALF, {"alpha": 2}),
    "lerp": (aten.lerp.Scalar, X, HALF, 0.3),
    "addcmul": (aten.addcmul.default, X, HALF, X, {"value": 0.5}),
    "rsub": (aten.rsub.Scalar, X, 1.5),
    "div": (aten.div.Tensor, X, 3.0),
    "pow": (aten.pow.Tensor_Scalar, X, 2),
    "maximum": (aten.maximum.default, X, HALF),
    "softmax": (aten._softmax.default, X, 1, False),
    "log_softmax": (aten.log_softmax.int, X, -1),
    "view": (aten.view.default, X, [Images(1), 6, -1]),
    "view of pixels": (aten.view.default, X, [Images(48), 6]),
    "reshape": (aten.reshape.default, X, [Images(2), 3, 48]),
    "at least": (aten.ge.Tensor, X, HALF),
    "where": (aten.where.self, aten.lt, HALF, torch.ones(())),
    "truncated": (aten._to_copy.default, X, {"dtype": torch.int8}),
    "round": (aten.round.default, X),
    "flatten": (aten.flatten.using_ints, X, 1),
    "unsqueeze": (aten.unsqueeze.default, X, 2),
    "transpose": (aten.transpose.int, X, 1, -1),
    "permute": (aten.permute.default, X, [0, 2, 3, 1]),
    "slice": (aten.slice.Tensor, X, 1, 1, 2**63 - 1, 2),
    "slice from the end": (aten.slice.Tensor, X, -1, 1, 5),
    "select": (aten.select.int, X, 1, -1),
    "split": (aten.split.Tensor, X, 4, 1, {"result": 1}),
    "split sizes": (aten.split_with_sizes.default, X, [1, 2, 3], 1, {"result": 2}),
    "unbind": (aten.unbind.int, X, -1, {"result": 2}),
    "cat": (aten.cat.default, [X, X], 1),
    "expand": (aten.expand.default, HALF.view(1, 6, 1), [Images(1), -1, 8]),
    "shuffle": (aten.pixel_shuffle.default, aten.cat, 2),
    "unshuffle": (aten.pixel_unshuffle.default, X, 2),
    "glu": (aten.glu.default, X, 1),
    "stack": (aten.stack.default, [X, X], 2),
    "sum of several": (aten.sum.dim_IntList, aten.stack, [0]),
    "cumsum": (aten.cumsum.default, X, -1),
    "rot90": (aten.rot90.default, X, 1, [2, 3]),
    "index": (aten.index.Tensor, X, [None, None, torch.tensor([[1], [-2]]), torch.tensor([0, -1, 4])]),
    "index_select": (aten.index_select.default, X, 2, torch.tensor([3, 0])),
    "windows": (aten.im2col.default, X, [3, 2], [1, 1], [1, 1], [2, 1]),
    "zeros": (aten.new_zeros.default, X, [Images(2), 6]),
    "ones": (aten.ones_like.default, X),
    "circular": (nn.CircularPad2d((1, 2, 0, 3)), X),
    "roll": (aten.roll.default, X, [2, -3], [2, -1]),
    "repeat": (aten.repeat.default, X, [1, 2, 1, 3]),
    "threshold": (aten.threshold.default, X, 0.25, -2.0),
    "norm": (aten.linalg_vector_norm.default, X, 2, [1], True),
    "argmax": (aten.argmax.default, X, 1),
    "nearest": (aten.upsample_nearest2d.vec, X, None, [2.0, 3.0]),
    "nearest of a size": (aten.upsample_nearest2d.default, X, [12, 20]),
    "bilinear": (aten.upsample_bilinear2d.vec, X, None, False, [2.0, 2.0]),
    "bilinear aligned": (aten.upsample_bilinear2d.default, X, [11, 13], True),
    "bilinear by a fraction": (aten.upsample_bilinear2d.default, X, [7, 12], False, 7 / 6, 1.5),
    "nearest by a fraction": (aten.upsample_nearest2d.default, X, [5, 6], 5 / 6, 0.75),
    "bilinear to a part of a pixel": (aten.upsample_bilinear2d.vec, X, None, False, [1.3, 1.5]),
    "nearest to a part of a pixel": (aten.upsample_nearest2d.vec, X, None, [1.3, 0.7]),
    "bicubic": (aten.upsample_bicubic2d.vec, X, None, False, [1.5, 2.0]),
    "bicubic aligned": (aten.upsample_bicubic2d.default, X, [11, 13], True),
    "pad": (aten.constant_pad_nd.default, X, [1, 2, 0, 1], 0.5),
    "reflect": (aten.reflection_pad2d.default, X, [1, 2, 0, 1]),
    "replicate": (aten.replication_pad2d.default, X, [1, 2, 0, 1]),
    **{f"pad {mode}": (aten.pad.default, X, [1, 2, 0, 3], mode) for mode in ("reflect", "replicate", "circular")},
    "average": (aten.avg_pool2d.default, X, [3, 3], [2, 2], [1, 1], True, False),
    "average with padding, up": (aten.avg_pool2d.default, X, [3, 3], [2, 2], [1, 1], True),
    "average with padding": (aten.avg_pool2d.default, X, [2], [], [1]),
    "largest": (aten.max_pool2d_with_indices.default, X, [3, 3], [2, 2], [1, 1], [1, 1], True, {"result": 0}),
    "average of volumes": (aten.avg_pool3d.default, aten.unsqueeze, [1, 2, 2]),
    "largest of volumes": (aten.max_pool3d_with_indices.default, aten.unsqueeze, [1, 2, 2], {"result": 0}),
    "adaptive volumes": (aten._adaptive_avg_pool3d.default, aten.unsqueeze, [1, 3, 4]),
    "nearest of volumes": (aten.upsample_nearest3d.vec, aten.unsqueeze, None, [2.0, 2.0, 3.0]),
    "replicate volumes": (aten.replication_pad3d.default, aten.unsqueeze, [1, 2, 0, 1, 0, 1]),
    "linear signals": (aten.upsample_linear1d.default, aten.amax, [12], False),
    "nearest of a computed size": (aten.upsample_nearest2d.vec, X, [12, 20], None),
    "adaptive": (aten._adaptive_avg_pool2d.default, X, [3, 4]),
    "adaptive uneven": (aten._adaptive_avg_pool2d.default, X, [4, 3]),
    "nearest exact": (aten._upsample_nearest_exact2d.vec, X, None, [1.5, 2.0]),
    "adaptive largest": (aten.adaptive_max_pool2d.default, X, [1, 1], {"result": 0}),
    "mean": (aten.mean.dim, X, [-1, -2], True),
    "amax": (aten.amax.default, X, [2, 3]),
    "max": (aten.max.dim, X, 1, True, {"result": 0}),
    "min": (aten.min.dim, X, 2, {"result": 0}),
    "product": (aten.prod.dim_int, X, 1),
    "logsumexp": (aten.logsumexp.default, X, [1], True),
    "variance": (aten.var.correction, X, [2, 3], {"correction": 1}),
    "deviation": (aten.std_mean.correction, X, [1], {"keepdim": True, "result": 0}),
    "mean of both": (aten.var_mean.correction, X, [1], {"keepdim": True, "result": 1}),
    "norm by statistics": (
        *(aten._native_batch_norm_legit_no_training.default, X, torch.linspace(-1, 2, 6), torch.linspace(0, 1, 6)),
        *(torch.linspace(-1, 1, 6), torch.linspace(0.1, 2, 6), 0.1, 1e-2, {"result": 0}),
    ),
    "norm of batches": (aten._native_batch_norm_legit.no_stats, aten.view, None, None, True, 0.1, 1e-5, {"result": 0}),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, X, X, X, {"result": 0}),
    "attention with a mask": (
        *(aten._scaled_dot_product_flash_attention_for_cpu.default, X, X, X),
        {"result": 0, "attn_mask": WEIGHT, "scale": 0.5},
    ),
    "matmul": (aten.matmul.default, X, torch.randn(8, 5, generator=torch.Generator().manual_seed(0))),
    "linear": (aten.linear.default, aten.permute, WEIGHT, torch.arange(6.0)),
    "layer norm": (aten.native_layer_norm.default, X, [8], torch.arange(8.0), torch.ones(8), 1e-5, {"result": 0}),
    "group norm": (aten.group_norm.default, X, 3, torch.arange(6.0), torch.ones(6)),
    "instance norm": (nn.InstanceNorm2d(6), X),
    "transposed": (
        *(aten.convolution.default, X, torch.ones(6, 2, 3, 3), torch.ones(4), [2, 2], [1, 1], [1, 1], True),
        *([1, 1], 2),
    ),
    "dilated": (aten.conv2d.default, X, torch.ones(4, 6, 3, 3), None, [1, 1], [2, 2], [2, 2]),
}
BEFORE = {
    aten.lt: ((aten.lt.Scalar, X, 0.5), 6),
    aten.view: ((aten.view.default, X, [1, Images(6), 6, 8]), 6),
    aten.mean: ((aten.mean.dim, X, [2], True), 6),
    aten.stack: ((aten.stack.default, [X, X]), 6),
    aten.cat: ((aten.cat.default, [X, X], 1), 12),
    aten.unsqueeze: ((aten.unsqueeze.default, X, 2), 6),
    aten.amax: ((aten.amax.default, X, [2]), 6),
    aten.permute: ((aten.permute.default, X, [0, 2, 3, 1]), 8),
}


def of_functions(name: str) -> Program:
    """A program of one function, or of two."""
    function, first, *rest = FUNCTIONS[name]
    own = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    program = Program(6)
    if not isinstance(first, list) and first in BEFORE:
        (before, *arguments), channels = BEFORE[first]
        program.add(ops.Function(inputs=(0,), channels=channels, function=before, arguments=tuple(arguments)))
    arguments = X if len(program.operations) > 1 else first, *rest
    named = {key: value for key, value in own.items() if key != "result"}
    given: dict[str, Any] = {"inputs": (len(program.operations) - 1,), "result": own.get("result")}
    program.outputs = (
        program.add(
            ops.Function(channels=0, function=function, arguments=arguments, named=named, origin="part", **given)
        ),
    )
    return program
