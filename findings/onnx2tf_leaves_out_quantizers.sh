#!/usr/bin/env bash
# onnx2tf 1.29.24: it leaves out quantizers of activations, and so each ReLU that ONNX Runtime has joined with one.
#
# Expected: QuantizeLinear and DequantizeLinear round to the step and end at the smallest and the largest code, or the
# file is refused.
# Happens: the pair gives its input back. quantize_static of ONNX Runtime takes out a Relu before a QuantizeLinear to
# uint8, whose smallest code is 0.0 then; so a network loses all its ReLUs, and is a linear function. Other ranges, of
# ReLU6 or of clipped 4-bit activations, go the same way. Nothing is said.
# Seen, for a network that is |x| = ReLU(x) + ReLU(-x), of -1 0.5 1: float, both 1 0.5 1; quantized, ONNX Runtime
# 0.996 0.502 0.996, LiteRT 0 0 0. One pair by itself, step 0.5, zero point 0 of uint8, of -2 0.3 200: ONNX Runtime
# 0 0.5 127.5, LiteRT -2 0.3 200.
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
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static


class Images(CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": np.array([[[[-1, 0.5, 1]]]], np.float32)}])

    def get_next(self):
        return next(self.left, None)


def write(path, nodes, held):
    graph = helper.make_graph(
        [helper.make_node(*node) for node in nodes],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 1, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 1, 3])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def outputs(path, image):
    """What ONNX Runtime and LiteRT compute."""
    image = np.array([[[image]]], np.float32)
    wanted = onnxruntime.InferenceSession(path).run(None, {"x": image})[0].ravel().tolist()
    onnx2tf.convert(input_onnx_file_path=path, output_folder_path="made", non_verbose=True)
    interpreter = Interpreter("made/" + path.replace(".onnx", "_float32.tflite"))
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image.transpose(0, 2, 3, 1))
    interpreter.invoke()
    found = interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).ravel().tolist()
    return [round(number, 3) for number in wanted], [round(number, 3) for number in found]


write(
    "float.onnx",
    [("Conv", ["x", "split"], ["a"]), ("Relu", ["a"], ["b"]), ("Conv", ["b", "add"], ["y"])],
    {"split": np.array([1, -1], np.float32).reshape(2, 1, 1, 1), "add": np.ones((1, 2, 1, 1), np.float32)},
)
quantize_static(
    "float.onnx", "quantized.onnx", Images(), quant_format=QuantFormat.QDQ, activation_type=QuantType.QUInt8
)
kinds = [node.op_type for node in onnx.load("quantized.onnx").graph.node]
assert kinds.count("Conv") == 2 and "Relu" not in kinds
write(
    "pair.onnx",
    [("QuantizeLinear", ["x", "step", "zero"], ["code"]), ("DequantizeLinear", ["code", "step", "zero"], ["y"])],
    {"step": np.array(0.5, np.float32), "zero": np.array(0, np.uint8)},
)
for path, image, right, wrong in (
    ("float.onnx", [-1, 0.5, 1], [1, 0.5, 1], [1, 0.5, 1]),
    ("quantized.onnx", [-1, 0.5, 1], [0.996, 0.502, 0.996], [0, 0, 0]),
    ("pair.onnx", [-2, 0.3, 200], [0, 0.5, 127.5], [-2, 0.3, 200]),
):
    wanted, found = outputs(path, image)
    print("RESULT", path, image, f"ONNX Runtime {wanted} LiteRT {found}")
    assert np.allclose(wanted, right, atol=0.001)
    assert np.allclose(found, wrong, atol=0.001)
END
sed -n 's/^RESULT //p' log
