#!/usr/bin/env bash
# OpenVINO 2026.4.1: Resize of an ONNX file drops keep_aspect_ratio_policy, and stretches the picture.
#
# Expected: with "not_larger" the picture becomes as large as fits into the sizes, with "not_smaller" as small as covers
# them, both with its own ratio of height and width, as ONNX Runtime has it, and as is done in front of detectors.
# Happens: the option is not read. Sizes are taken as with "stretch", the default, so pixels are no squares any more.
# Nothing is said, and shape inference of the file itself says the other size.
# Seen, a picture of 6 x 9, sizes 8 x 8: ONNX Runtime and onnx's shape inference 5 x 8 and 8 x 12, OpenVINO 8 x 8 for
# both, and the numbers of "stretch".
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

picture = np.arange(54, dtype=np.float32).reshape(1, 1, 6, 9)


def outputs(policy, mode):
    """The inferred height and width, and what ONNX Runtime and OpenVINO give."""
    options = {"mode": mode, "axes": [2, 3], "keep_aspect_ratio_policy": policy}
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, picture.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.int64([8, 8]), "sizes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, "network.onnx")
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    inferred = [each.dim_value for each in model.graph.output[0].type.tensor_type.shape.dim][2:]
    session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
    compiled = openvino.Core().compile_model("network.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return inferred, session.run(None, {"x": picture})[0][0, 0], compiled([picture])[0][0, 0]


for mode in ("nearest", "linear"):
    stretched = outputs("stretch", mode)[2]
    for policy, shape in (("stretch", (8, 8)), ("not_larger", (5, 8)), ("not_smaller", (8, 12))):
        inferred, wanted, found = outputs(policy, mode)
        print(f"{mode}, {policy}: inferred {tuple(inferred)}, ONNX Runtime {wanted.shape}, OpenVINO {found.shape}")
        assert tuple(inferred) == wanted.shape == shape
        assert np.array_equal(found, stretched)
        assert policy != "stretch" or np.allclose(found, wanted, atol=1e-4)
END
