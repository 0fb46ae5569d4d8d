#!/usr/bin/env bash
# onnx 1.23.2: the ReferenceEvaluator's cubic GridSample with padding_mode border is not PyTorch's or ONNX Runtime's.
#
# Expected: a point between pixels has 4 × 4 pixels around it; those outside of the image are the border's, as in
# torch.nn.functional.grid_sample, from which torch.onnx exports this operator, and as with zeros and reflection here.
# Happens: the point is moved into the image first, and then has the weights of its new place. So points up to a pixel
# outside, and no others, get other values. Nothing is said.
# Seen, 5 × 6 pixels of standard deviation 1, 256 points up to 1.3 times as far as the corners, largest difference from
# PyTorch: cubic with border 0.2; the other eight, and ONNX Runtime 1.32.0 in all nine, below 2e-6.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__, "torch", torch.__version__)
draw = np.random.default_rng(0)
image = draw.standard_normal((1, 1, 5, 6)).astype(np.float32)
points = (1.3 * (2 * draw.random((1, 16, 16, 2)) - 1)).astype(np.float32)
feed = {"x": image, "g": points}
inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feed.items()]
output = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 16, 16))
for mode, of_torch in (("nearest", "nearest"), ("linear", "bilinear"), ("cubic", "bicubic")):
    for padding in ("zeros", "border", "reflection"):
        node = helper.make_node("GridSample", ["x", "g"], ["y"], mode=mode, padding_mode=padding, align_corners=1)
        graph = helper.make_graph([node], "g", inputs, [output])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        wanted = torch.nn.functional.grid_sample(
            torch.tensor(image).double(), torch.tensor(points).double(), of_torch, padding, align_corners=True
        )
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        runtime = session.run(None, feed)[0] - wanted.numpy()
        reference = ReferenceEvaluator(model).run(None, feed)[0] - wanted.numpy()
        print(f"{mode}, {padding}: reference {abs(reference).max():.1e}, ONNX Runtime {abs(runtime).max():.1e}")
        places = (points[0] + 1) / 2 * [5, 4]  # in pixels
        just_outside = (((places > -1) & (places < 0)) | ((places > [5, 4]) & (places < [6, 5]))).any(-1)
        assert abs(runtime).max() < 1e-5 and abs(reference[0, 0][~just_outside]).max() < 1e-5
        assert (abs(reference).max() > 0.05) == ((mode, padding) == ("cubic", "border"))
END
