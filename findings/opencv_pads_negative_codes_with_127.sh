#!/usr/bin/env bash
# OpenCV 5.0.0: Pad of int8 codes with a negative code pads with 127, the largest number.
#
# Expected: the code that the file gives: the zero point, as ONNX Runtime's quantizer writes it, so that the edge is
# 0.0.
# Happens: cv2.dnn reads the byte as unsigned and cuts it off at 127. Activations behind a ReLU have zero point -128:
# the frame of a picture becomes the brightest that one can be in place of black, and spoils the convolutions behind it.
# Nothing is said. Codes from 0 to 127 and uint8 are right, and so is padding between quantizers, done in floats.
# Seen, for int8 codes -128, -100, -7, -1: 127 four times, ONNX Runtime the codes; 0, 7, 127 right; uint8 0, 131, 255
# right. Conv, ReLU, Pad, Conv in int8 of quantize_static (QOperator): the frame is 8.0, the largest number, not 0.0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python opencv-python-headless==5.0.0.93 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import numpy as np
import onnxruntime
from onnx import helper, load, numpy_helper, save
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

node = helper.make_node
pads = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
x = np.linspace(-4, 4, 16, dtype=np.float32).reshape(1, 1, 4, 4)


def model(nodes, constants):
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    ends = [[helper.make_tensor_value_info(name, 1, [1, 1, n, n])] for name, n in (("x", 4), ("y", 6))]
    graph = helper.make_graph(nodes, "graph", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def computed(content):
    net = cv2.dnn.readNetFromONNX(np.frombuffer(content, np.uint8))
    net.setInput(x)
    return net.forward(), onnxruntime.InferenceSession(content).run(None, {"x": x})[0]


for codes, wrong in (((-128, -100, -7, -1), True), ((0, 7, 127), False), ((0, 131, 255), False)):
    kind = np.uint8 if 131 in codes else np.int8
    for code in codes:
        constants = {"s": np.float32(1 / 32), "z": kind(0), "p": pads, "c": kind(code)}
        nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("Pad", ["q", "p", "c"], ["r"])]
        nodes += [node("DequantizeLinear", ["r", "s", "z"], ["y"])]
        found, expected = (array * 32 for array in computed(model(nodes, constants).SerializeToString()))
        edge = np.ones((6, 6), bool)
        edge[1:-1, 1:-1] = False
        print(f"found {kind.__name__} {code}: {found[0, 0, 0, 0]:.0f}, ONNX Runtime {expected[0, 0, 0, 0]:.0f}")
        assert (expected[0, 0][edge] == code).all() and (found[0, 0][edge] == (127 if wrong else code)).all()
        assert np.array_equal(found[0, 0][~edge], expected[0, 0][~edge])


class Reader(CalibrationDataReader):
    left = 1

    def get_next(self):
        self.left, left = 0, self.left
        return {"x": x} if left else None


nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["r"]), node("Pad", ["r", "p"], ["d"])]
nodes += [node("Conv", ["d", "v"], ["y"])]
filters = np.ones((1, 1, 1, 1), np.float32)
save(model(nodes, {"p": pads, "w": filters, "v": filters * 2}), "float.onnx")
for style, frame in ((QuantFormat.QOperator, 8.0), (QuantFormat.QDQ, 0.0)):
    kinds = dict(activation_type=QuantType.QInt8, weight_type=QuantType.QInt8)
    quantize_static("float.onnx", "codes.onnx", Reader(), quant_format=style, **kinds)
    found, expected = computed(load("codes.onnx").SerializeToString())
    print(f"of quantize_static, {style.name}: frame {found[0, 0, 0, 0]:.2f}, ONNX Runtime {expected[0, 0, 0, 0]:.2f}")
    assert abs(found[0, 0][edge] - frame).max() < 0.05 and (expected[0, 0][edge] == 0).all()
END
