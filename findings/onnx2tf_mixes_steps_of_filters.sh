#!/usr/bin/env bash
# onnx2tf 1.29.24: with three filters or more, steps of quantized weights are given to other filters.
#
# Expected: weights behind DequantizeLinear become floats, code less zero point, times the step of the filter.
# Happens: the list of steps is taken for a shape, and moved from NCHW to NHWC: the second step becomes the last, and
# all between move up. So do zero points. Only the first filter is right. Nothing is said. One step for all is right.
# Seen, for weights of code 4, input 1: steps 0.5 0.25 2 1: ONNX Runtime 2 1 8 4, LiteRT 2 8 4 1; steps 0.5 0.25: both
# 2 1; zero points 0 1 2 3 with step 1: ONNX Runtime 4 3 2 1, LiteRT 4 2 1 3; MatMul, as for Conv: 2 8 4 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx2tf==1.29.24 onnx==1.19.1 onnxruntime==1.23.0 \
  tensorflow==2.19.0 tf-keras==2.19.0 ai-edge-litert==2.1.0 onnxsim==0.4.36 numpy==1.26.4
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import numpy as np
import onnx
import onnx2tf
import onnxruntime
from ai_edge_litert.interpreter import Interpreter
from onnx import TensorProto, helper, numpy_helper


def outputs(operator, steps, zeros=None):
    """What ONNX Runtime and LiteRT compute for an input of 1 and weights of code 4."""
    count, is_conv = len(steps), operator == "Conv"
    held = {"codes": np.full((count, 1, 1, 1) if is_conv else (1, count), 4, np.int8)}
    held["steps"] = np.array(steps, np.float32)
    if zeros:
        held["zeros"] = np.array(zeros, np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", list(held), ["weight"], axis=0 if is_conv else 1),
        helper.make_node(operator, ["x", "weight"], ["y"]),
    ]
    last = [1, 1] if is_conv else []
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, *last])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, count, *last])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    image = np.ones((1, 1, *last), np.float32)
    wanted = onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0].ravel().tolist()
    onnx2tf.convert(input_onnx_file_path="network.onnx", output_folder_path="made", non_verbose=True)
    interpreter = Interpreter("made/network_float32.tflite")
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    return wanted, interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).ravel().tolist()


for case, wrong in (
    (("Conv", [0.5, 0.25]), [2, 1]),
    (("Conv", [0.5, 0.25, 2, 1]), [2, 8, 4, 1]),
    (("Conv", [1, 1, 1, 1], [0, 1, 2, 3]), [4, 2, 1, 3]),
    (("MatMul", [0.5, 0.25, 2, 1]), [2, 8, 4, 1]),
):
    wanted, found = outputs(*case)
    print("RESULT", *case, "ONNX Runtime", *wanted, "LiteRT", *found)
    zeros = case[2] if len(case) > 2 else [0] * len(case[1])
    assert wanted == [step * (4 - zero) for step, zero in zip(case[1], zeros, strict=True)]
    assert found == wrong
END
sed -n 's/^RESULT //p' log
