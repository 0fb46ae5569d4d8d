"""What FINN and hls4ml compute from a QONNX file: hardware.py finn|hls4ml FILE IMAGES.npy OUTPUTS.npy."""

import sys
from typing import Any

import numpy as np
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.util.cleanup import cleanup_model


def finn(model: Any, images: Any) -> Any:
    """Streamlined, and with convolutions as products of matrices."""
    from finn.transformation.qonnx.convert_qonnx_to_finn import ConvertQONNXtoFINN  # pyright: ignore
    from finn.transformation.streamline import Streamline, absorb  # pyright: ignore
    from finn.transformation.streamline.reorder import MakeMaxPoolNHWC  # pyright: ignore
    from qonnx.transformation.infer_datatypes import InferDataTypes
    from qonnx.transformation.infer_shapes import InferShapes
    from qonnx.transformation.lower_convs_to_matmul import LowerConvsToMatMul

    steps = [
        *(ConvertQONNXtoFINN(), InferShapes(), InferDataTypes(), Streamline(), LowerConvsToMatMul()),
        *(MakeMaxPoolNHWC(), absorb.AbsorbTransposeIntoMultiThreshold(), Streamline(), InferDataTypes()),
    ]
    for step in steps:
        model = model.transform(step)
    assert not any(node.op_type in ("Conv", "Quant", "BipolarQuant") for node in model.graph.node)
    given, found = model.graph.input[0].name, model.graph.output[0].name
    return np.concatenate([execute_onnx(model, {given: image[None]})[found] for image in images])


def hls4ml(model: Any, images: Any) -> Any:
    """Simulated in C."""
    import hls4ml as tool  # pyright: ignore
    from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean

    model = cleanup_model(model.transform(ConvertToChannelsLastAndClean()))
    config = tool.utils.config.config_from_onnx_model(
        model, granularity="name", backend="Vitis", default_precision="fixed<48,16>"
    )
    options = {"io_type": "io_stream", "backend": "Vitis", "hls_config": config}
    written = tool.converters.convert_from_onnx_model(model, output_dir="hls", **options)
    written.compile()
    return written.predict(images)


if __name__ == "__main__":
    tool, file, images, outputs = sys.argv[1:]
    np.save(outputs, globals()[tool](cleanup_model(ModelWrapper(file)), np.load(images)))
