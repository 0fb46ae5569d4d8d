"""Export of trained models to ONNX, for ONNX Runtime and others."""

from .export import export_onnx as export_onnx
from .runtime import OnnxModel as OnnxModel, compare_onnx as compare_onnx
