#!/usr/bin/env bash
# aimet-onnx 2.42.0: equalize_model makes Relu of each Clip from 0 between convolutions, whatever its upper end is.
#
# Expected: equalization keeps the numbers of a network of floats, and leaves a pair of layers alone where it cannot, as
# that of aimet-torch 2.42.0 does for ReLU6, with a warning.
# Happens: a Clip whose minimum is 0 between two Conv or ConvTranspose is taken for ReLU6, and becomes Relu. Its maximum
# is not looked at: it may be 1, as of activations that are quantized from 0 to 1. If another layer reads the first
# convolution before the Clip, as a skip connection does, the Relu comes before that one, too. Nothing is said. So it is
# with bounds in Constant nodes, as torch.onnx.export(dynamo=False) writes them; with bounds as initializers, Clip stays.
# Seen, as largest change by largest output: Conv, Clip from 0 to 1, Conv: 5.1; to 6: 0.50; to 255: 0; -1 to 1: 0; Relu
# and no Clip: 0; Clip to 255 and a skip connection from before it: 0.21.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python aimet-onnx==2.42.0 onnx==1.23.2 onnxruntime==1.32.0 \
    torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import logging

import numpy as np
import onnx
import onnxruntime
from aimet_onnx.cross_layer_equalization import equalize_model
from onnx import helper, numpy_helper

logging.disable(logging.CRITICAL)


def network(bounds, skip, initializers=False):
    random = np.random.default_rng(0)
    constants = {
        "w": random.normal(size=(8, 4, 3, 3)),
        "b": np.zeros(8),
        "v": random.normal(size=(8, 8, 3, 3)),
        "c": np.zeros(8),
    }
    middle = helper.make_node("Relu", ["y"], ["z"], "middle")
    if bounds:
        middle = helper.make_node("Clip", ["y", "low", "high"], ["z"], "middle")
    nodes = []
    for name, bound in zip(("low", "high"), bounds or ()):
        number = numpy_helper.from_array(np.array(bound, np.float32))
        if initializers:
            constants[name] = np.array(bound)
        else:  # as PyTorch's exporter writes them
            nodes.append(helper.make_node("Constant", [], [name], name, value=number))
    nodes += [
        helper.make_node("Conv", ["x", "w", "b"], ["y"], "first", pads=[1] * 4),
        middle,
        helper.make_node("Conv", ["z", "v", "c"], ["u" if skip else "out"], "second", pads=[1] * 4),
    ]
    if skip:
        nodes.append(helper.make_node("Add", ["u", "y"], ["out"], "skip"))
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4, 8, 8])],
        [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1, 8, 8, 8])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"x": np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float32)})[0]


for bounds, skip, changed in (
    (None, False, False),
    ((0, 1), False, True),
    ((0, 6), False, True),
    ((0, 255), False, False),  # no number is above 255 here
    ((-1, 1), False, False),
    ((0, 255), True, True),
    (None, True, False),
):
    model = network(bounds, skip)
    exact = run(model)
    equalize_model(model)
    change = np.abs(run(model) - exact).max() / np.abs(exact).max()
    nodes = [(node.op_type, node.input[0]) for node in model.graph.node if node.op_type != "Constant"]
    print(f"Clip {bounds}, skip connection {skip}: change {change:.2g}, {nodes}")
    assert change > 0.15 if changed else change < 1e-4
    if bounds and bounds[0] == 0:
        assert "Clip" not in [node.op_type for node in model.graph.node]
model = network((0, 1), False, initializers=True)
exact = run(model)
equalize_model(model)
assert np.abs(run(model) - exact).max() < 1e-4 * np.abs(exact).max()
print("Clip (0, 1) with its bounds as initializers: no change")
END
cat output
