"""The graph of a traced network, rewritten layer by layer."""

import copy
from collections import Counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..kernels.operators import WORD
from ..layers import ComputedFilters, QConv2d, QLinear, QuantizedLayer
from ..layers.adopt import release
from ..layers.bypassed import has_own_forward
from ..quantizers import Codes, Identity
from .adapters import Distance, OfLastDimension, Padded, WithScaleMap
from .arithmetic import Arithmetic, arithmetic, frozen_layer
from .boundaries import as_rounding, staircase
from .fixed_weight import fix_weight_
from .frozen_layers import BinaryConv2d, IntegerConv2d, IntegerLayer, OffsetBinaryConv2d
from .functional import Clamp, as_modules
from .one_magnitude import sign_layer

UNCHANGED = (nn.Identity, nn.Dropout, nn.Dropout2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_RISING = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, Clamp)
SURE_THRESHOLD = 20
"""From here on float32 rounds away that torch's softplus falls where it becomes the identity."""


class Frozen(NamedTuple):
    """The result of freezing a layer.

    Attributes:
        name: the name of the layer in the model.
        arithmetic: "binary", "offset", "integer", "shift" or "float".
        gives: its output: "floats", "bits", "codes", or "distances" of sums from their thresholds.
        folded: names of what it replaces: modules of the model, the "norm" of one that holds its activation, or
            functions in its forward, for which `FrozenModel.functions` has modules.
        reader: the layer that reads its codes; empty for floats.
        reason: why it stays float, or outputs floats.
    """

    name: str
    arithmetic: str
    gives: str = "floats"
    folded: tuple[str, ...] = ()
    reader: str = ""
    reason: str = ""


class _StaysFloat(Exception):  # noqa: N818  # not an error: the reason why a layer outputs floats
    """Raised with the reason why a layer outputs floats."""


class Rewriter:
    """Replaces the layers of a traced module and the modules after them.

    Args:
        module: the traced module.
        prefix: the prefix of its names.
        is_single: whether it calls a single layer, named by the prefix.
        tolerance: as in `freeze`.
        shared: modules that other traced modules call, too, and their replacements there.

    Attributes:
        frozen: the results for the layers.
        functions: the modules that replaced functions, by their names in the model.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        prefix: str,
        is_single: bool,
        tolerance: float,
        shared: dict[nn.Module, nn.Module | None],
    ) -> None:
        self.module, self.prefix, self.is_single, self.tolerance = module, prefix, is_single, tolerance
        self.shared = shared
        self.functions = {prefix + name: made for name, made in as_modules(module, shared).items()}
        self.nodes = [node for node in module.graph.nodes if node.op == "call_module"]
        self.calls = Counter(node.target for node in self.nodes)
        self.calls.update({node.target for node in self.nodes if self.of(node) in shared})
        self.arithmetic = {
            node: arithmetic(layer) for node in self.nodes if isinstance(layer := self.of(node), QuantizedLayer)
        }
        self.takes_codes: set[fx.Node] = set()
        self.frozen: list[Frozen] = []
        self.beside = self._read_beside()

    def of(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls; None if its class does not determine what it computes."""
        module = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        return None if module is None or has_own_forward(module) else module

    def _read_beside(self) -> dict[nn.Module, str]:
        """Return the layers that the network uses other than by calls, with the reasons; they stay unchanged."""
        modules = dict(self.module.named_modules())
        reasons: dict[nn.Module, str] = {}
        for node in self.module.graph.nodes:
            if node.op not in ("call_module", "get_attr") or not node.users:
                continue
            target = str(node.target)
            for name, module in modules.items():
                if isinstance(module, QuantizedLayer | _ConvNd) and name and target.startswith(f"{name}."):
                    reasons[module] = f"the forward around it reads its {target.removeprefix(f'{name}.')}"
            called = modules.get(target) if node.op == "call_module" else None
            for module in () if called is None else called.modules():
                if module is not called and isinstance(module, QuantizedLayer | _ConvNd):
                    reasons[module] = f"it is in '{target}' ({type(called).__name__}), whose forward stays Python"
        return reasons

    def run(self) -> None:
        """Replace the layers one by one."""
        for name, module in self.module.named_modules():
            if isinstance(module, QuantizedLayer) and module in self.beside:
                self.frozen.append(Frozen(self.prefix + name, "float", reason=self.beside[module]))
        for node in self.nodes:
            module = self.of(node)
            if module in self.beside:
                continue
            if isinstance(module, QuantizedLayer):
                self._freeze(node, module, self.arithmetic[node])
            elif isinstance(module, _ConvNd):
                self._fold_float(node)
        for node in self.module.graph.nodes:  # values in the channels_last format have other strides
            is_view = node.op == "call_method" and node.target == "view"
            if is_view and len(node.args) > 1 and not isinstance(node.args[1], torch.dtype):
                node.target = "reshape"
        self.module.delete_all_unused_submodules()
        self.module.graph.lint()
        self.module.recompile()

    def _name(self, node: fx.Node) -> str:
        return self.prefix.removesuffix(".") if self.is_single else self.prefix + str(node.target)

    def _next(self, node: fx.Node) -> fx.Node | None:
        """The only user of a node, if it is a module; one with parameters must be called only once."""
        users = list(node.users)
        module = self.of(users[0]) if len(users) == 1 and users[0].args == (node,) and not users[0].kwargs else None
        if module is None or (self.calls[users[0].target] > 1 and next(iter(module.state_dict()), None) is not None):
            return None
        return users[0]

    def _freeze(self, node: fx.Node, layer: QuantizedLayer, arithmetic: Arithmetic) -> None:
        target, name = str(node.target), self._name(node)
        if any(frozen.name == name for frozen in self.frozen):
            return  # called twice, and replaced already
        if (replaced_before := self.shared.get(layer)) is not None:
            self.module.set_submodule(target, replaced_before)
            return
        if arithmetic.kind == "float":
            if isinstance(layer.input_quantizer, Identity):
                layer = copy.deepcopy(layer)  # other parts may call it, too
                _bake(layer)
                self._put(node, layer)
                folded = self._fold_float(node)
                if (signs := sign_layer(self.of(node))) is not None:
                    self.module.set_submodule(target, signs)
                self.frozen.append(Frozen(name, "float", folded=folded, reason=arithmetic.reason))
            else:
                layer = copy.deepcopy(layer)
                fix_weight_(layer)
                self._put(node, layer)
                self.frozen.append(Frozen(name, "float", reason=arithmetic.reason))
            return
        new = frozen_layer(layer, arithmetic)
        if isinstance(new, BinaryConv2d | IntegerConv2d) and node in self.takes_codes:
            new.encoder = None
            if isinstance(new, BinaryConv2d):
                new.takes_bits = True
        told = Frozen(name, arithmetic.kind)
        if layer.has_scale_map:
            bias = None if layer.bias is None else layer.bias.detach().clone()
            new.bias.zero_()
            is_conv = isinstance(layer, QConv2d)
            inner = new if is_conv else OfLastDimension(new)
            kernel_size = layer.kernel_size if is_conv else None
            replaced: nn.Module = WithScaleMap(inner, new.window, kernel_size, len(new.scale), bias)
            told = told._replace(reason="its output is multiplied by the map of input magnitudes")
        else:
            if self.calls[target] == 1:
                told = self._fold(node, new, arithmetic, told)
            replaced = OfLastDimension(new, of_rows=bool(told.folded)) if isinstance(layer, QLinear) else new
        if isinstance(layer, QConv2d) and layer.padding_mode != "zeros":
            replaced = Padded(tuple(layer.padding_sides), layer.padding_mode, replaced)
        self._put(node, replaced)
        self.frozen.append(told)

    def _put(self, node: fx.Node, replaced: nn.Module) -> None:
        """Make the node call another module."""
        if (before := self.of(node)) in self.shared and before is not None:
            self.shared[before] = replaced
        self.module.set_submodule(str(node.target), replaced)

    def _fold(self, node: fx.Node, new: IntegerLayer, arithmetic: Arithmetic, told: Frozen) -> Frozen:
        """Fold the modules after the frozen layer into it."""
        try:
            between, readers = self._way(node, arithmetic)
            gives = self._to_codes(node, new, arithmetic, between, readers)
        except _StaysFloat as stays:
            return self._fold_norm(node, new, arithmetic, told._replace(reason=str(stays)))
        self.takes_codes.update(readers)
        folded = [step for step in between if not _is_pool(self.of(step))]
        names = tuple(self.prefix + str(step.target) for step in folded)
        for step in folded:
            _remove(step)
        return told._replace(gives=gives, folded=names, reader=self.prefix + str(readers[0].target))

    def _fold_norm(self, node: fx.Node, new: IntegerLayer, arithmetic: Arithmetic, told: Frozen) -> Frozen:
        """Turn the batch norm after the layer into its scale and bias."""
        norm = self._next(node)
        module: Any = None if norm is None else self.of(norm)
        if norm is None or not _is_norm(module) or module.num_features != len(arithmetic.scale):
            return told
        factor, shift = _affine(module)
        new.scale = (arithmetic.scale * factor).to(new.scale.dtype)
        if isinstance(new, OffsetBinaryConv2d):
            new.centre = (arithmetic.centre * factor).to(new.centre.dtype)
        new.bias = (new.bias.double() * factor + shift).to(new.bias.dtype)
        _remove(norm)
        return told._replace(folded=(self.prefix + str(norm.target),))

    def _way(self, node: fx.Node, arithmetic: Arithmetic) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the modules between a layer and the quantized layers that read it."""
        between: list[fx.Node] = []
        last = node
        while (following := self._next(last)) is not None and not isinstance(self.of(following), QuantizedLayer):
            module = self.of(following)
            if not (_is_norm(module) or _is_monotone(module) or _is_pool(module)):
                raise _StaysFloat(f"{type(module).__name__} follows it")
            between.append(following)
            last = following
        readers = list(last.users)
        layers = [self.of(reader) for reader in readers]
        if not readers or not all(isinstance(layer, QuantizedLayer) for layer in layers):
            raise _StaysFloat("not only a quantized layer follows it")
        for reader, layer in zip(readers, layers, strict=True):
            if layer in self.beside:
                raise _StaysFloat(f"'{reader.target}' after it stays as it was trained")
            of_reader = self.arithmetic[reader]
            if of_reader.kind != arithmetic.kind or arithmetic.kind in ("shift", "offset"):
                raise _StaysFloat(f"'{reader.target}' after it is {of_reader.kind}")
            if isinstance(layer, QLinear) or layer.has_scale_map or layer.padding_mode != "zeros":  # pyright: ignore
                raise _StaysFloat(f"'{reader.target}' after it needs floats")
            if not layer.input_quantizer.at_work.is_elementwise:  # pyright: ignore
                raise _StaysFloat(f"'{reader.target}' after it quantizes a sample as a whole")
            shares = arithmetic.kind == "binary" and all(
                self.arithmetic[other].levels.rounding == "sign" for other in readers
            )
            if self.calls[reader.target] != 1 or (len(readers) > 1 and not shares):
                raise _StaysFloat("several calls read it")
            if arithmetic.kind == "binary" and layer.groups > 1 and layer.in_channels // layer.groups % WORD:  # pyright: ignore
                raise _StaysFloat(f"the groups of '{reader.target}' after it do not end where words of bits end")
        return between, readers

    def _to_codes(
        self, node: fx.Node, new: IntegerLayer, arithmetic: Arithmetic, between: list[fx.Node], readers: list[fx.Node]
    ) -> str:
        """Make the layer output the codes of the quantizer after it; return their kind."""
        if isinstance(self.of(node), QLinear):
            raise _StaysFloat("it is a linear layer")
        modules = [self.of(step) for step in between]
        pools = [index for index, module in enumerate(modules) if _is_pool(module)]
        elementwise = [copy.deepcopy(module).double() for module in modules if not _is_pool(module)]  # pyright: ignore
        if pools and arithmetic.kind != "binary":
            raise _StaysFloat("maximum pooling follows it")
        falling = [index for index, module in enumerate(modules) if _is_norm(module) and not _rises(module)]
        falls_behind = bool(pools) and any(index > pools[0] for index in falling)
        if falls_behind and (pools[0] != 0 or min(falling) < pools[-1]):
            raise _StaysFloat("maximum pooling stands before a batch norm with a negative gamma")
        if falls_behind and bool((arithmetic.scale < 0).any()):
            raise _StaysFloat("maximum pooling of a negative scale stands before a batch norm with a negative gamma")
        reader: Any = self.of(readers[0])
        quantizer, scale = reader.input_quantizer, arithmetic.scale
        bias = new.bias.double()

        def behind(output: Tensor) -> Tensor:
            output = output.double()[..., None, None]
            for module in elementwise:
                output = module(output)
            return output

        def values(sums: Tensor) -> Tensor:
            return behind(sums.double() * scale + bias)

        def codes(sums: Tensor) -> Tensor:
            # Rounded where the trained layer rounds, so that an output on the edge of two codes gets the trained one.
            output = behind(sums.float() * scale.float() + bias.float()).float()
            found_codes: Codes = quantizer.codes(output, *quantizer.tensors())
            return found_codes.values.reshape(sums.shape).long()

        channels = len(scale)
        if isinstance(new, BinaryConv2d):
            stairs = staircase(lambda sums: (codes(sums) + 1) // 2, channels, arithmetic.bound, 0, 1)
            threshold = stairs.edges.squeeze(0)
            if not pools:
                new.compare_(threshold.to(torch.int32), stairs.falling)
                return "bits"
            if arithmetic.bound >= 2**23:
                raise _StaysFloat("its sums are too large to be floats")
            # The distance to the threshold stays a number through pooling, where the largest one decides.
            new.scale, new.bias = torch.ones(channels), torch.zeros(channels)
            distance = Distance(threshold, stairs.falling)
            if not falls_behind:
                new.negate_(stairs.falling)
                distance = Distance(threshold, torch.zeros_like(stairs.falling))
            target = distance_name(str(node.target))
            while hasattr(self.module, target):  # a module of the user's
                target += "_"
            self.module.add_submodule(target, distance)
            last = between[-1]
            with self.module.graph.inserting_after(last):
                added = self.module.graph.call_module(target, (last,))
            last.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
            return "distances"
        of_reader = self.arithmetic[readers[0]]
        levels = of_reader.levels
        low, high = (end + of_reader.zero for end in levels[:2])
        stairs = staircase(lambda sums: codes(sums) + of_reader.zero, channels, arithmetic.bound, low, high)
        step, offset = (0.0 if number is None else number.detach().double() for number in (levels.scale, levels.offset))

        def in_codes(sums: Tensor) -> Tensor:
            return ((values(sums) - offset) / step).reshape(sums.shape) + of_reader.zero

        line = as_rounding(stairs, in_codes, self.tolerance)
        if line is None or not isinstance(new, IntegerConv2d):
            raise _StaysFloat("the codes after it are not a rounded straight line of its sums")
        new.round_(*line, low, high)
        return "codes"

    def _fold_float(self, node: fx.Node) -> tuple[str, ...]:
        """Fold the batch norm after a float layer into it."""
        norm = self._next(node)
        layer = self.of(node)
        if norm is None or not _is_norm(self.of(norm)) or self.calls[node.target] != 1:
            return ()
        if type(layer) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            return ()  # a forward of its own; or linear, where the channels may be another dimension
        fused = fuse_conv_bn_eval(layer, self.of(norm))  # pyright: ignore
        self.module.set_submodule(str(node.target), fused)
        name = self.prefix + str(norm.target)
        _remove(norm)
        return (name,)


def make_contiguous(network: fx.GraphModule) -> bool:
    """Convert the inputs of foreign modules to torch's default memory format; return whether there are any."""
    kinds = "torch.", f"{__name__.split('.')[0]}."
    is_changed = False
    for node in list(network.graph.nodes):
        if node.op != "call_module" or type(network.get_submodule(node.target)).__module__.startswith(kinds):
            continue
        for value in node.all_input_nodes:
            if value.target != "contiguous":
                with network.graph.inserting_before(node):
                    node.replace_input_with(value, network.graph.call_method("contiguous", (value,)))
                is_changed = True
    network.recompile()
    return is_changed


def distance_name(layer: str) -> str:
    """Return a name for the `Distance` after a layer; underscores follow if the name is taken."""
    return f"{layer}_distance"


def _remove(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
    node.graph.erase_node(node)


def _is_norm(module: nn.Module | None) -> bool:
    """Whether it is a batch norm that evaluates with stored statistics."""
    return type(module) in _NORMS and getattr(module, "running_mean", None) is not None


def _is_pool(module: nn.Module | None) -> bool:
    """Whether it selects the largest of some elements and so keeps their order; not a subclass."""
    return type(module) is nn.MaxPool2d


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """``factor, shift`` of each channel, in float64."""
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.double()
    shift = -norm.running_mean.double() * factor
    return factor, shift if norm.bias is None else shift + norm.bias.double()


def _rises(norm: Any) -> bool:
    return norm.weight is None or bool((norm.weight >= 0).all())


def _is_monotone(module: nn.Module | None) -> bool:
    """Whether a larger input never gives a smaller output, element by element."""
    if type(module) is nn.LeakyReLU:
        return module.negative_slope >= 0
    if type(module) is nn.Softplus:
        return module.threshold >= SURE_THRESHOLD
    if type(module) is nn.PReLU:
        return bool((module.weight >= 0).all())
    return type(module) in _RISING + UNCHANGED  # a subclass may compute something different


def _bake(layer: QuantizedLayer) -> None:
    """Turn the layer into a float one for evaluation, with the quantized weight as its weight."""
    weight_q, baked = layer.quantized_weight(), cast(Any, layer)
    kind = layer.baked_type if isinstance(layer, ComputedFilters) else None
    release(layer)
    with torch.no_grad():
        baked.weight.copy_(weight_q)
    if kind is not None:
        baked.__class__ = kind
        for name in {*baked._parameters} - {"weight", "bias"}:  # of which the weight was computed
            delattr(baked, name)
