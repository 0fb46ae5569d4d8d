#!/usr/bin/env bash
# ExecuTorch 1.5.1: its XNNPACK backend ignores quant_min and quant_max of PT2E's quantize_per_tensor.
#
# Expected: codes from -8 to 7 in int8, as of 4-bit activations, end at -8 and 7 on the device as in torch, or the backend
# leaves such a quantizer to ExecuTorch's own kernels.
# Happens: XNNPACK takes it, and codes end at -128 and 127. ExecuTorch's own kernels clip. Nothing is said.
# Seen, for -10, 0.2, 10 and a step of 0.5 around code 0: torch -4.0 0.0 3.5; own kernels -4.0 0.0 3.5; XNNPACK -10.0 0.0 10.0
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python executorch==1.5.1 torch==2.15.0
environment/bin/python -W ignore - 2>/dev/null <<'END'
import executorch.kernels.quantized  # the kernels of the operators below
import torch
import torch.ao.quantization.fx._decomposed  # the operators of PT2E
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime

codes = torch.ops.quantized_decomposed
levels = 0.5, 0, -8, 7, torch.int8


class Quantized(torch.nn.Module):
    def forward(self, x):
        return codes.dequantize_per_tensor(codes.quantize_per_tensor(x, *levels), *levels)


images = torch.tensor([-10.0, 0.2, 10.0]).view(1, 1, 1, 3)
outputs = {"torch": Quantized()(images).flatten().tolist()}
for name, partitioner in (("own kernels", []), ("XNNPACK", [XnnpackPartitioner()])):
    lowered = to_edge_transform_and_lower(
        torch.export.export(Quantized(), (images,)),
        partitioner=partitioner,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    content = lowered.to_executorch().buffer
    program = Runtime.get().load_program(content)
    outputs[name] = program.load_method("forward").execute([images])[0].flatten().tolist()
for name, output in outputs.items():
    print(name, *output)
assert outputs["torch"] == outputs["own kernels"] == [-4.0, 0.0, 3.5]
assert outputs["XNNPACK"] == [-10.0, 0.0, 10.0]
END
