#!/usr/bin/env bash
# onnx 1.23.2, tract 0.23.9: a Resize with align_corners by a fraction misses the last corner; PyTorch meets it.
#
# Expected: with align_corners the first and last pixels of both images lie on each other, which the option is for;
# PyTorch, ONNX Runtime and OpenVINO do so. PyTorch's exporter writes scales for scale_factor.
# Happens: the standard's evaluator and tract divide by scale * size - 1, which is no whole number: for 5 pixels and a
# factor of 1.5, 7.5 - 1 in place of 7 - 1. So all pixels but the first are moved, and the last corner is not reached.
# onnx's own test data say so, too. Nothing is said. Where scale * size is whole all agree.
# Seen, pixels 0 to 4, factor 1.5: PyTorch, ONNX Runtime, OpenVINO end at 4, the other two at 3.69; factor 2: all at 4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 \
    tract==0.23.9 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import openvino
import torch
import tract
from onnx.reference import ReferenceEvaluator

picture = np.broadcast_to(np.arange(5, dtype=np.float32), (1, 1, 5, 5)).copy()
for mode in ("bilinear", "bicubic"):
    for factor in (1.5, 1.3, 2.0):
        layer = torch.nn.Upsample(scale_factor=factor, mode=mode, align_corners=True)
        wanted = layer(torch.tensor(picture)).numpy()
        torch.onnx.export(
            layer, (torch.tensor(picture),), "network.onnx", dynamo=False, opset_version=13, input_names=["x"]
        )
        model = onnx.load("network.onnx")
        resize = model.graph.node[-1]
        assert resize.op_type == "Resize"
        assert len(resize.input) == 3
        session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
        compiled = openvino.Core().compile_model("network.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        by_tract = tract.onnx().load("network.onnx").into_model().into_runnable().run([picture])[0].to_numpy()
        found = {
            "ONNX Runtime": session.run(None, {"x": picture})[0],
            "OpenVINO": compiled([picture])[0],
            "onnx": ReferenceEvaluator(model).run(None, {"x": picture})[0],
            "tract": by_tract,
        }
        ends = {name: round(float(output[0, 0, -1, -1]), 2) for name, output in found.items()}
        print(f"{mode} by {factor}: last corner of PyTorch {wanted[0, 0, -1, -1]:.2f},", ends)
        for name, output in found.items():
            assert output.shape == wanted.shape
            is_right = factor == 2 or name in ("ONNX Runtime", "OpenVINO")
            error = abs(output - wanted).max()
            assert (error < 1e-4) if is_right else (error > 0.1)
END
