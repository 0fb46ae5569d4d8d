#!/usr/bin/env bash
# torch 2.15.0: the ONNX exporter drops quant_min and quant_max of PT2E's quantize_per_tensor.
#
# Expected: codes of 4 bits, as in a model of convert_pt2e with quant_min=0 and quant_max=15, end at 15 in the file,
# too, by a Clip or a 4-bit type; or the export is refused, as that of fake_quantize_per_channel_affine is.
# Happens: the file has QuantizeLinear to uint8 alone, so its codes end at 255. It gives other numbers wherever the
# network clips. Nothing is said.
# Seen, for 1, 7, 20 and a step of 0.5: torch 1.0, 7.0, 7.5; the file 1.0, 7.0, 20.0
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import onnx
import onnxruntime
import torch
import torch.ao.quantization.fx._decomposed  # the operators of PT2E

codes = torch.ops.quantized_decomposed
levels = 0.5, 0, 0, 15, torch.uint8


class Quantized(torch.nn.Module):
    def forward(self, input):
        return codes.dequantize_per_tensor.default(codes.quantize_per_tensor.default(input, *levels), *levels)


input = torch.tensor([[1.0, 7.0, 20.0]])
torch.onnx.export(Quantized().eval(), (input,), "codes.onnx", dynamo=True, verbose=False)
session = onnxruntime.InferenceSession("codes.onnx")
wanted = Quantized()(input)
(file,) = session.run(None, {session.get_inputs()[0].name: input.numpy()})
operators = [node.op_type for node in onnx.load("codes.onnx").graph.node]
print("torch:", wanted.tolist(), "file:", file.tolist(), operators)
assert wanted.tolist() == [[1.0, 7.0, 7.5]]
assert file.tolist() == [[1.0, 7.0, 20.0]]
assert operators == ["QuantizeLinear", "DequantizeLinear"]
END
