#!/usr/bin/env bash
# qonnx 1.0.0: as XNOR layers, bipolar convolutions that are padded with 0 are padded with -1.
#
# FINN lowers a convolution of signs to Im2Col and MatMul, and ConvertBipolarMatMulToXnorPopcount replaces -1 and +1 by
# the bits 0 and 1. The 0 with which Im2Col pads is then the bit of -1.
# Expected: the sums stay those of the convolution, whose padding adds nothing; or the transformation refuses.
# Happens: each padded pixel counts as -1, without a message. Not padded, the sums are right.
# Seen, as the largest difference from the convolution, and from one padded with -1:
# padding 0: 0.0 0.0; padding 1: 16.0 0.0
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qonnx==1.0.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import numpy as np
from onnx import helper, numpy_helper
from qonnx.core.datatype import DataType
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.bipolar_to_xnor import ConvertBipolarMatMulToXnorPopcount
from qonnx.transformation.infer_datatypes import InferDataTypes
from qonnx.transformation.infer_shapes import InferShapes
from qonnx.transformation.lower_convs_to_matmul import LowerConvsToMatMul

generator = np.random.default_rng(0)
weight = np.where(generator.normal(size=(4, 8, 3, 3)) > 0, 1, -1).astype(np.float32)
image = generator.normal(size=(1, 8, 5, 5)).astype(np.float32)
DOMAIN = "qonnx.custom_op.general"


def network(padding):
    sign = {"out_dtype": "BIPOLAR", "out_scale": 2.0, "out_bias": -1.0}
    window = {"kernel_shape": [3, 3], "strides": [1, 1], "dilations": [1, 1], "group": 1, "pads": [padding] * 4}
    nodes = [
        helper.make_node("MultiThreshold", ["x", "edge"], ["signs"], domain=DOMAIN, **sign),
        helper.make_node("Conv", ["signs", "weight"], ["y"], **window),
    ]
    shapes = {"x": [1, 8, 5, 5], "y": [1, 4, 3 + 2 * padding, 3 + 2 * padding]}
    ends = [[helper.make_tensor_value_info(name, 1, shape)] for name, shape in shapes.items()]
    held = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.zeros((1, 1), np.float32), "edge")]
    graph = helper.make_graph(nodes, "signs", *ends, held)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = ModelWrapper(helper.make_model(graph, opset_imports=domains, ir_version=9))
    model.set_tensor_datatype("weight", DataType["BIPOLAR"])
    return model.transform(InferShapes()).transform(InferDataTypes())


def summed(padding, value):
    signs = np.where(image >= 0, 1.0, -1.0)
    ends = (0, 0), (0, 0), (padding, padding), (padding, padding)
    signs, size = np.pad(signs, ends, constant_values=value), 3 + 2 * padding
    taps = [(i, j) for i in range(3) for j in range(3)]
    return sum(np.einsum("nchw,oc->nohw", signs[:, :, i : i + size, j : j + size], weight[:, :, i, j]) for i, j in taps)


found = {}
for padding in (0, 1):
    model = network(padding)
    assert np.array_equal(execute_onnx(model, {"x": image})["y"], summed(padding, 0))
    lowered = model.transform(LowerConvsToMatMul()).transform(InferDataTypes())
    xnor = lowered.transform(ConvertBipolarMatMulToXnorPopcount())
    sums = execute_onnx(xnor, {"x": image})["y"]
    found[padding] = [float(abs(sums - summed(padding, value)).max()) for value in (0, -1)]
    print(f"padding {padding}:", *found[padding])
assert found[0] == [0, 0]
assert found[1][0] > 0 and found[1][1] == 0
END
