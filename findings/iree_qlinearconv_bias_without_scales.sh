#!/usr/bin/env bash
# IREE 3.13.0: the bias of an ONNX QLinearConv is not scaled if weights have a scale for each filter.
#
# A bias is int32 codes, whose step is that of the input times that of the filter.
# Expected: bias 100 with steps 0.5 and 0.02 adds 1, as with one scale for all filters, and as ONNX Runtime computes it.
# Happens: with a scale for each filter it adds 100: the codes themselves. So nearly all outputs end at the smallest or
# the largest code. Nothing is said. Without a bias, and from QuantizeLinear and DequantizeLinear, outputs are right.
# ONNX Runtime's quantizer writes such a QLinearConv with QuantFormat.QOperator and per_channel=True.
# Seen, for input 0, biases 100 and -100, weight steps 0.02, 0.01: ONNX Runtime 1 -0.5; IREE 15.875 -16, the ends of
# int8 with step 0.125; one step, 0.02: both 1 -1; Conv of QuantizeLinear and DequantizeLinear: both 1 -0.5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python "iree-base-compiler[onnx]==3.13.0" iree-base-runtime==3.13.0 \
  onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
import subprocess

import iree.runtime
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def network(steps, form):
    """A convolution by 1 of two filters, whose biases are 100 and -100, between int8 codes."""
    zeros = np.zeros(np.shape(steps), np.int8)
    held = {"sx": np.float32(0.5), "zx": np.int8(0), "sy": np.float32(0.125), "zy": np.int8(0)}
    held |= {"w": np.ones((2, 1, 1, 1), np.int8), "sw": steps, "zw": zeros, "b": np.array([100, -100], np.int32)}
    nodes = [helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["codes"])]
    if form == "QLinearConv":
        inputs = ["codes", "sx", "zx", "w", "sw", "zw", "sy", "zy", "b"]
        nodes += [helper.make_node("QLinearConv", inputs, ["out"])]
    else:
        held["sb"] = np.float32(0.5) * steps
        nodes += [
            helper.make_node("DequantizeLinear", ["codes", "sx", "zx"], ["input"]),
            helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["weight"], axis=0),
            helper.make_node("DequantizeLinear", ["b", "sb"], ["bias"], axis=0),
            helper.make_node("Conv", ["input", "weight", "bias"], ["sum"]),
            helper.make_node("QuantizeLinear", ["sum", "sy", "zy"], ["out"]),
        ]
    nodes += [helper.make_node("DequantizeLinear", ["out", "sy", "zy"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 1, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 1, 1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def of_iree(model, image):
    onnx.save(model, "network.onnx")
    subprocess.run(["environment/bin/iree-import-onnx", "network.onnx", "-o", "network.mlir"], check=True)
    device = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
    device.append("--iree-llvmcpu-target-cpu=generic")
    subprocess.run(["environment/bin/iree-compile", "network.mlir", *device, "-o", "network.vmfb"], check=True)
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    with open("network.vmfb", "rb") as file:
        context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, file.read()))
    return context.modules.module["graph"](image).to_host().ravel().tolist()


image = np.zeros((1, 1, 1, 1), np.float32)
each, same = np.array([0.02, 0.01], np.float32), np.float32(0.02)
for steps, form, right, wrong in (
    (each, "QLinearConv", [1, -0.5], [15.875, -16]),
    (same, "QLinearConv", [1, -1], [1, -1]),
    (each, "Conv", [1, -0.5], [1, -0.5]),
):
    model = network(steps, form)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": image})[0].ravel().tolist()
    found = of_iree(model, image)
    print(form, "weight steps", steps, "ONNX Runtime", *wanted, "IREE", *found)
    assert wanted == right and found == wrong
END
