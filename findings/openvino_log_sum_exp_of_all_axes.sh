#!/usr/bin/env bash
# OpenVINO 2026.4.1: ReduceL1, ReduceLogSum and ReduceLogSumExp of ONNX files of opsets 13 to 17 reduce all axes.
#
# Expected: the axes of the attribute `axes`, which was there until opset 17, as ReduceL2, ReduceSumSquare, ReduceMean
# and ReduceMax have them in OpenVINO, and as these three have them in opset 11 and since opset 18.
# Happens: the attribute is not read, and one number is left of all images, channels and pixels. With keepdims it fits
# the rest of the network by broadcasting: logits less their LogSumExp are normalized over the whole batch. Nothing is
# said.
# Seen, sums of 4 images' exp(logits - LogSumExp), which should be 1 each: ONNX Runtime 1 1 1 1, OpenVINO in opset 17
# 0.19 0.43 0.25 0.13, in opsets 11 and 18 1 1 1 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

WRONG = ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp")
RIGHT = ("ReduceL2", "ReduceSumSquare", "ReduceMean", "ReduceMax")
draw = np.random.default_rng(0)


def outputs(kind, opset, axes, x, behind=()):
    """What ONNX Runtime and OpenVINO give for a reduction, and for the nodes behind it."""
    is_input = opset >= 18
    options = {} if is_input else {"axes": axes}
    node = helper.make_node(kind, ["x", *["axes"] * is_input], ["reduced"], keepdims=1, **options)
    nodes = [node, *(helper.make_node(*each) for each in behind)]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.int64(axes), "axes")] * is_input,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
    compiled = openvino.Core().compile_model("network.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return session.run(None, {"x": x})[0], compiled([x])[0]


image = np.abs(draw.normal(size=(2, 3, 4, 5))).astype(np.float32) + 1
for opset in (11, 13, 17, 18):
    for kind in WRONG + RIGHT:
        for axes in ([2, 3], [1], [-1]):
            wanted, found = outputs(kind, opset, axes, image)
            is_wrong = kind in WRONG and 13 <= opset <= 17
            assert found.shape == ((1, 1, 1, 1) if is_wrong else wanted.shape)
            assert is_wrong or np.allclose(found, wanted, rtol=1e-4)
logits = draw.normal(size=(4, 10)).astype(np.float32)
behind = [("Sub", ["x", "reduced"], ["logs"]), ("Exp", ["logs"], ["y"])]
for opset in (11, 17, 18):
    wanted, found = (each.sum(axis=1) for each in outputs("ReduceLogSumExp", opset, [1], logits, behind))
    print(f"opset {opset}: ONNX Runtime", *wanted.round(2), "OpenVINO", *found.round(2))
    assert np.allclose(wanted, 1)
    assert np.allclose(found.sum(), 1) if opset == 17 else np.allclose(found, 1)
END
