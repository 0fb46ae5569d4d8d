#!/usr/bin/env bash
# Brevitas 0.13.4: a QONNX export of accumulator-aware weights holds the weights without the bound on their sum.
#
# Expected: the quantized weights of the trained layer. Their absolute codes sum up to no more than 2**(bits of the
# accumulator - 1) over the largest input code: this is what the quantizers of A2Q and A2Q+ are for. Or an error, as
# export_onnx_qcdq raises it.
# Happens: the file quantizes the raw weights, with the right step. Its outputs are those of another network, and its
# sums overflow the accumulator that hardware made from it would have. Nothing is said. Plain quantizers and those of
# weight normalization export right.
# Seen, for 36 inputs, the largest sum of absolute codes of a filter: A2Q of 12 bits 1 in Brevitas, bound 16, and 2,643
# in the file; of 16 bits 241, bound 256, and 2,643; A2Q+ of 16 bits 243, bound 512, and 2,643. Outputs of the
# convolution up to 0.005, 0.22 and 0.22, those of the file off by 2.2, 2.0 and 2.0; linear layers alike. Plain
# quantizer: 5e-7.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python brevitas==0.13.4 torch==2.15.0 onnx==1.23.2 \
    onnxoptimizer==0.4.2 onnxscript==0.7.2 onnxruntime==1.32.0 qonnx==1.0.0 numpy==2.4.6 setuptools==80.9.0
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import numpy as np
import torch
from brevitas import nn, quant
from brevitas.export import export_onnx_qcdq, export_qonnx
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.infer_shapes import InferShapes

cases = [(quant.Int8AccumulatorAwareWeightQuant, 12), (quant.Int8AccumulatorAwareWeightQuant, 16)]
cases += [(quant.Int8AccumulatorAwareZeroCenterWeightQuant, 16), (quant.Int8WeightPerChannelFloat, None)]
for quantizer, bits in cases:
    for kind in ("convolution", "linear"):
        torch.manual_seed(0)
        options = {"bias": False, "weight_quant": quantizer} | ({"weight_accumulator_bit_width": bits} if bits else {})
        layer = nn.QuantConv2d(4, 6, 3, **options) if kind == "convolution" else nn.QuantLinear(36, 6, **options)
        network = torch.nn.Sequential(nn.QuantIdentity(return_quant_tensor=True), layer)
        shape = (16, 4, 8, 8) if kind == "convolution" else (16, 36)
        for _ in range(5):
            network(torch.randn(shape))
        network.eval()
        x = torch.randn(shape)
        with torch.no_grad():
            expected = network(x)
            expected = getattr(expected, "value", expected).numpy()
            arguments = [network[0](x)] if bits else []
            weight = layer.quant_weight(*arguments)
            sums = (weight.value / weight.scale).abs().reshape(6, -1).sum(1)
        export_qonnx(network, args=x, export_path="network.onnx")
        model = ModelWrapper("network.onnx").transform(InferShapes())
        names = model.graph.input[0].name, model.graph.output[0].name
        tensors = execute_onnx(model, {names[0]: x.numpy()}, return_full_exec_context=True)
        node = [node for node in model.graph.node if node.op_type in ("Quant", "IntQuant")][-1]
        written = abs(tensors[node.output[0]] / tensors[node.input[1]]).reshape(6, -1).sum(1)
        off, largest = abs(tensors[names[1]] - expected).max(), abs(expected).max()
        print(f"found {quantizer.__name__}, {bits} bits, {kind}: sums {sums.max():.0f}, file {written.max():.0f};")
        print(f"found     outputs up to {largest:.3f}, those of the file off by {off:.1e}")
        if bits is None:
            assert off < 1e-5 and abs(sums.numpy() - written).max() < 0.01
            continue
        bound = 2 ** (bits - 1) / 128 * (2 if "ZeroCenter" in quantizer.__name__ else 1)
        assert sums.max() <= bound and written.min() > 1000 and off > 0.9 * largest
        try:
            export_onnx_qcdq(network, args=x, export_path="other.onnx")
        except RuntimeError as error:
            assert "not support" in str(error)
        else:
            raise AssertionError("export_onnx_qcdq wrote a file")
END
grep found output
