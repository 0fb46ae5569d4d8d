"""ONNX: what was trained, for ONNX Runtime and others."""

from .export import export_onnx as export_onnx
from .run import OnnxModel as OnnxModel
from .run import compare_onnx as compare_onnx
