"""Comparison of each operator of a written file with torch's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from ..inference.parts import name_in_model
from .runtime import load

_CLOSE = 1e-4  # of the largest number that an operator takes or gives: the difference that rounding can explain
_NOT_IN_NUMPY = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
_FEW = 1e-3  # of an output: the share of numbers that may fall to the other side of an edge, as of a floor


def check_operators(file: Any, program: ExportedProgram, input: Tensor) -> None:
    """Compare each operator of a program with ONNX Runtime's result in the file, from the same numbers.

    So a code that falls to the other side of an edge changes nothing: what follows starts from the same code.

    Args:
        file: the file's content, an `onnx.ModelProto`; its values have the names of the program's nodes.
        program: that from which the file was written.
        input: the input of both.

    Raises:
        ValueError: ONNX Runtime can't run the file, or an operator differs by more than rounding explains.
    """
    import onnx

    shown = onnx.ModelProto()
    shown.CopyFrom(file)
    made = {name for node in file.graph.node for name in node.output}
    names = {node.name: node.name for node in program.graph.nodes if node.name in made and _is_comparable(node)}
    shown.graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, names))
    names[program.graph.output_node().all_input_nodes[0].name] = file.graph.output[0].name
    session = load(shown.SerializeToString(), torch.get_num_threads(), optimized=False)
    try:
        values = session.run(list(names.values()), {file.graph.input[0].name: input.numpy()})
    except Exception as error:  # its own kinds
        reason = str(error).splitlines()[0]
        raise ValueError(f"with an input of shape {tuple(input.shape)}, ONNX Runtime reports: {reason}") from error
    found = {node: torch.from_numpy(value) for node, value in zip(names, values, strict=True)}
    _Compared(program, found).run(*_tensors(program, input))


def _is_comparable(node: fx.Node) -> bool:
    """Whether a node has a tensor output that ONNX Runtime hands to Python in torch's form."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_complex() and value.dtype not in _NOT_IN_NUMPY


def _tensors(program: ExportedProgram, input: Tensor) -> list[Any]:
    """Return the inputs of a program's graph: parameters, buffers, constants, and the input."""
    signature, held = program.graph_signature, {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    places = (node.name for node in program.graph.nodes if node.op == "placeholder")
    return [held[names[place]] if place in names else input for place in places]


class _Compared(fx.Interpreter):
    """Runs each operator on the file's numbers before it, and compares."""

    def __init__(self, program: ExportedProgram, values: Mapping[str, Tensor]) -> None:
        super().__init__(program.graph_module)
        self.values, self.extra_traceback = values, False

    def run_node(self, n: fx.Node) -> Any:
        is_symbolic = getattr(n.target, "namespace", "") == "onnx_symbolic"
        wanted = _by_definition(*self.fetch_args_kwargs_from_env(n)[0]) if is_symbolic else super().run_node(n)
        value = self.values.get(n.name)
        if value is None:  # merged with others
            return wanted
        given = [each for each in map(self.env.get, n.all_input_nodes) if isinstance(each, Tensor)]
        if difference := _difference(wanted, value, given):
            stack = n.meta.get("nn_module_stack") or {"": ("", "")}
            path = name_in_model(list(stack.values())[-1][0])
            where = f"'{path}'" if path else "the model's forward"
            raise ValueError(f"{n.target} in {where} {difference}")
        return value


def _by_definition(inputs: list[Tensor], name: str, *_: Any) -> Tensor:
    """Return the result of an ONNX operator of `codes` and `layers`, by its definition."""
    if name == "LeakyRelu":
        return inputs[0]  # its slope is 1
    input, scale, zero = inputs
    if scale.numel() > 1:
        scale, zero = (each.view(-1, *[1] * (input.ndim - 1)) for each in (scale, zero))
    if name == "QuantizeLinear":
        return ((input / scale).round() + zero.int()).clamp(0, 255).to(torch.uint8)
    return (input.int() - zero.int()).float() * scale


def _difference(wanted: Tensor, got: Tensor, given: list[Tensor]) -> str:
    """Return the difference in words, unless rounding explains it; ONNX operators may return anything for NaN."""
    if got.shape != wanted.shape:
        return f"has shape {tuple(got.shape)} there, and {tuple(wanted.shape)} in torch"
    numbers = [each.double() for each in (wanted, *given) if each.numel()]
    if not wanted.numel() or any(bool(each.isnan().any()) for each in numbers):
        return ""
    largest = max(float(each.abs().nan_to_num(0, 0, 0).max()) for each in numbers)
    got, wanted = got.double(), numbers[0]
    wrong = ~torch.isclose(got, wanted, rtol=0, atol=_CLOSE * largest)
    if int(wrong.sum()) <= _FEW * wrong.numel():
        return ""
    most = (got - wanted)[wrong].abs().max()
    return f"differs from torch's by up to {most:.2g} where the largest number is {largest:.2g}"
