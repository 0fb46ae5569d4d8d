#!/usr/bin/env bash
# hls4ml 1.3.0: Softmax is too flat for logits of a wide type, and beyond 16 whole bits all classes get the same share.
#
# Expected: more bits bring the numbers nearer to the right ones, as in other layers. One takes many where scales of
# quantized weights are small.
# Happens: exp is a table of 1024 entries, read with the upper bits of the logits' type. hls4ml makes it wide enough
# for every sum of the products, and for default_precision. With 12 whole bits one entry is for a range of 2, so logits
# of 4 and 3 are a tie; with 17 it is for 64, and the network has no opinion. Nothing is said.
# Seen, for logits 4 3 2 1 0 -1 -2 -3 of 8 bits: right 0.632 0.233 0.086 0.031; fixed<16,6> 0.444 0.444 0.060 0.060;
# fixed<24,12> 0.250 0.250 0.250 0.250; fixed<32,16> all eight 0.125. Needs g++.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hls4ml==1.3.0 qonnx==1.0.0 onnx==1.23.2 onnxruntime==1.32.0 \
    numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import hls4ml
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.util.cleanup import cleanup_model

DOMAIN = "qonnx.custom_op.general"
x = np.array([[4, 3, 2, 1, 0, -1, -2, -3]], np.float32)
numbers = {"x_scale": 0.25, "weight_scale": 1, "zero": 0, "x_bits": 8, "weight_bits": 2}
form = {"domain": DOMAIN, "signed": 1, "narrow": 0, "rounding_mode": "ROUND"}
graph = helper.make_graph(
    [
        helper.make_node("Quant", ["x", "x_scale", "zero", "x_bits"], ["x_q"], **form),
        helper.make_node("Quant", ["weight", "weight_scale", "zero", "weight_bits"], ["weight_q"], **form),
        helper.make_node("MatMul", ["x_q", "weight_q"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["y"], axis=-1),
    ],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)],
    [
        *(numpy_helper.from_array(np.float32(number), name) for name, number in numbers.items()),
        numpy_helper.from_array(np.eye(x.size, dtype=np.float32), "weight"),
    ],
)
domains = [helper.make_opsetid("", 13), helper.make_opsetid(DOMAIN, 1)]
model = cleanup_model(ModelWrapper(helper.make_model(graph, opset_imports=domains, ir_version=8)))
(right,) = execute_onnx(model, {model.graph.input[0].name: x}).values()
print("RESULT right:", *right.ravel().round(3))
WANTED = {"fixed<16,6>": [0.444, 0.444, 0.060, 0.060], "fixed<24,12>": [0.25] * 4, "fixed<32,16>": [0.125] * 4}
for precision, wanted in WANTED.items():
    config = hls4ml.utils.config_from_onnx_model(
        model, granularity="name", backend="Vitis", default_precision=precision
    )
    found = hls4ml.converters.convert_from_onnx_model(model, output_dir="project", backend="Vitis", hls_config=config)
    found.compile()
    shares = found.predict(x).ravel()
    print(f"RESULT {precision}:", *shares.round(3))
    assert np.allclose(shares[:4], wanted, atol=0.002)
assert len(set(shares.tolist())) == 1
assert np.allclose(right.ravel()[:4], [0.632, 0.233, 0.086, 0.031], atol=0.001)
END
sed -n 's/^RESULT //p' log
