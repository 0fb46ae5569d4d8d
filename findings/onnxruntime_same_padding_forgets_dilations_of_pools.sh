#!/usr/bin/env bash
# ONNX Runtime 1.32.0: pools with dilations and auto_pad SAME give smaller pictures, as padding is that of no dilation.
#
# Expected: what ONNX defines for SAME_UPPER and SAME_LOWER: each side of the output is that of the input divided by the
# stride, rounded up. Its shape inference says so, and the file declares it.
# Happens: the padding is computed for the window without dilations, so a window of 3 with dilation 2 lacks two rows and
# columns of it, and the picture has moved. Of Conv with the same attributes, ONNX Runtime says that it does not support
# them. Here no error comes; at most its log warns of a shape. A global pool behind works on with other numbers.
# Seen, for 12 x 12, window 3, MaxPool and AveragePool alike: dilation 1 12 x 12 for stride 1, 6 x 6 for 2; dilation 2
# 10 x 10, 5 x 5; dilation 3 8 x 8, 4 x 4. With the padding of dilations 1 and 2 written as numbers: 12 x 12 and 6 x 6.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
SIZE = 12
x = np.random.default_rng(0).normal(size=(1, 2, SIZE, SIZE)).astype(np.float32)


def pads(dilation, stride, upper):
    missing = max((-(-SIZE // stride) - 1) * stride + 2 * dilation + 1 - SIZE, 0)
    low = missing // 2 if upper else missing - missing // 2
    return low, missing - low


def reference(kind, dilation, stride, upper):
    before, behind = pads(dilation, stride, upper)
    padded = np.pad(x.astype(float), [(0, 0), (0, 0), (before, behind), (before, behind)], constant_values=np.nan)
    side = -(-SIZE // stride)
    result = np.empty((1, 2, side, side))
    for row in range(side):
        for column in range(side):
            rows, columns = (slice(i * stride, i * stride + 2 * dilation + 1, dilation) for i in (row, column))
            window = padded[:, :, rows, columns]
            result[:, :, row, column] = (np.nanmax if kind == "MaxPool" else np.nanmean)(window, axis=(2, 3))
    return result


def run(kind, side, **attributes):
    graph = helper.make_graph(
        [helper.make_node(kind, ["x"], ["out"], "pool", kernel_shape=[3, 3], **attributes)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 2, side, side])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)  # the declared shape is that of ONNX's inference
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


for kind in ("MaxPool", "AveragePool"):
    for dilation in (1, 2, 3):
        for stride in (1, 2):
            for named in ("SAME_UPPER", "SAME_LOWER"):
                exact = reference(kind, dilation, stride, named == "SAME_UPPER")
                common = {"dilations": [dilation] * 2, "strides": [stride] * 2}
                found = run(kind, exact.shape[2], auto_pad=named, **common)
                print(f"{kind}, dilation {dilation}, stride {stride}, {named}: {exact.shape[2:]} in {found.shape[2:]}")
                low, high = pads(dilation, stride, named == "SAME_UPPER")
                if max(low, high) < 3:  # larger ones than the window are refused
                    numbers = run(kind, exact.shape[2], pads=[low, low, high, high], **common)
                    assert np.abs(numbers - exact).max() < 1e-5
                if dilation == 1:
                    assert np.abs(found - exact).max() < 1e-5
                else:
                    assert found.shape[2] == (SIZE + 2 - 2 * dilation) // stride < exact.shape[2]
END
cat output
