"""Programs that C runs: an operator of torch over their plans, and a module that calls it where torch traces."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.library import LIBRARY
from ..kernels.native import kernels
from .fuse import NotFused, missing
from .operations import ConvFloats, Length, Operation, Program, Size, as_images
from .parts import Part, split
from .plan import Plan, program_bytes
from .read import read_program

_PLANS = 8  # that are kept: of a model for as many sizes of images, and of the operator
# Multiplications of floats with signs in an image from which tables for signs, which torch calls, are faster than a
# fixed order of sums: on one thread with AVX-512, 16 images take a ResNet-18 of 554 million 67 ms with tables and 158
# as a plan, a ResNet-20 of 40 million 10.5 and 11.9; one image 6.7 and 10.2, 1.5 and 0.8.
_MANY = 1 << 27


class _Opened:
    """A program's bytes and a size of images, as a key for the plan that they give."""

    def __init__(self, content: Tensor, size: Size) -> None:
        self.size = size
        self.hold(content.clone() if content.storage_offset() % 8 else content)

    def hold(self, content: Tensor) -> None:
        self.content = content
        self.words = content[: len(content) // 8 * 8].view(torch.int64)  # a file has no more; ten times as fast

    def __hash__(self) -> int:
        return hash((len(self.content), self.size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opened) and self.size == other.size and torch.equal(self.words, other.words)


@lru_cache(_PLANS)
def _opened(key: _Opened) -> Plan:
    key.hold(key.content.clone())  # the caller's may change, or lie in memory that a package frees
    return Plan(key.content, key.size)


@lru_cache(_PLANS)
def _read(key: _Opened) -> tuple[Program, bool]:
    key.hold(key.content.clone())
    return read_program(key.content)


def run_program(program: Tensor, images: Tensor, shape: list[int]) -> Tensor:
    """Return the output of a program for images; ``torch.ops.qconv.run_program``.

    A plan in C computes it on the CPU; elsewhere, or without the kernels, `Program.run`, which gives the same bits,
    slowly, on the CPU.

    Args:
        program: the bytes of a program's file, uint8 (`program_bytes`).
        images: (N, C, H, W), float32, of any strides, on any device.
        shape: how the output's follows (`Program.shape`).

    Raises:
        ValueError: damaged bytes; images or a shape that are not the program's.
    """
    if program.dtype != torch.uint8 or program.ndim != 1:
        raise ValueError(f"program ({program.dtype}, {program.ndim} dimensions) must be bytes, of one dimension")
    if images.dtype != torch.float32 or images.ndim != 4:
        raise ValueError(f"images ({images.dtype}, {images.ndim} dimensions) must be float32 (N, C, H, W)")
    run = _by_plan if images.is_cpu and kernels() is not None else _by_definition
    output = run(program.contiguous(), images, (images.shape[2], images.shape[3]))
    wanted = output_shape(images, shape)
    if len(wanted) == 2 and output.shape[2:] == (1, 1):
        output = output.flatten(1)
    if output.shape != wanted:
        raise ValueError(f"shape (={list(shape)}) gives an output {wanted}; the program's is {tuple(output.shape)}")
    return output


def _by_plan(content: Tensor, images: Tensor, size: Size) -> Tensor:
    plan = _opened(_Opened(content, size))
    _check(images, plan.channels)
    output, *others = plan(images, threads=torch.get_num_threads())
    if others:
        raise ValueError("the program has several outputs")
    return output


def _by_definition(content: Tensor, images: Tensor, size: Size) -> Tensor:
    program, guard = _read(_Opened(content.cpu(), (0, 0)))
    _check(images, program.operations[0].channels)
    if program.size not in (None, size):
        raise ValueError(f"the program is for images of {program.size}, not {size}")
    floats = images.cpu()
    output = program.run(floats)
    if guard:
        output[~floats.isfinite().flatten(1).all(1)] = torch.nan
    return output.to(images.device)


def run_operation(operation: Operation, *values: Tensor) -> Tensor:
    """Return what `Operation.run` does; sums of floats, whose definition is slow, from C, with the same bits."""
    if not isinstance(operation, ConvFloats) or kernels() is None or not (values[0].is_cpu and values[0].numel()):
        return operation.run(*values)
    program = Program(values[0].shape[1])
    program.outputs = (program.add(replace(operation, inputs=(0,))),)
    plan = Plan(program_bytes(program, False), (values[0].shape[2], values[0].shape[3]))
    return plan(values[0], threads=torch.get_num_threads())[0]


def _check(images: Tensor, channels: int) -> None:
    if images.shape[1] != channels:
        raise ValueError(f"images have {images.shape[1]} channels; the program takes {channels}")


def output_shape(images: Tensor, shape: Any) -> tuple[int, ...]:
    """Return the shape of a program's output for images; its sizes may be symbols."""
    if len(shape) == 1:
        return images.shape[0], shape[0]
    channels, *numbers = shape
    lengths = [Length(*numbers[first : first + 3]) for first in range(0, len(numbers), 3)]
    size = list(images.shape[2:])
    for place, length in enumerate(lengths):
        side = 2 * place // len(lengths)
        size[side] = length.of(size[side])
    return images.shape[0], channels, *size


if not hasattr(torch.ops.qconv, "run_program"):  # else `csrc/torch_operator.cpp` is loaded, for the CPU
    LIBRARY.define("run_program(Tensor program, Tensor images, int[] shape) -> Tensor")
LIBRARY.impl("run_program", run_program, "CompositeExplicitAutograd")


@torch.library.register_fake("qconv::run_program", lib=LIBRARY)
def _(program: Tensor, images: Tensor, shape: list[int]) -> Tensor:
    size = output_shape(images, shape)
    for length in size[2:]:
        torch._check(length > 0, lambda: "images are too small for a window of the program")
    return images.new_empty(size)


class _Plans:
    """A program's plans for the last sizes of its inputs.

    Args:
        content: the program's bytes.
        is_last: whether outputs have channels last, as kernels do.
    """

    def __init__(self, content: Tensor, is_last: bool) -> None:
        self.content, self.is_last = content, is_last
        self._plans: dict[tuple[Size, ...], Plan] = {}

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        sizes = tuple([(input.shape[2], input.shape[3]) for input in inputs])
        return self.of(sizes)(*inputs, threads=torch.get_num_threads(), memory_format=self.memory_format)

    @property
    def memory_format(self) -> torch.memory_format:
        """That of outputs."""
        return torch.channels_last if self.is_last else torch.contiguous_format

    def of(self, sizes: tuple[Size, ...]) -> Plan:
        """Return the plan for inputs of these sizes."""
        plan = self._plans.get(sizes)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.pop(next(iter(self._plans)), None)  # another thread may have done it
            plan = self._plans[sizes] = Plan(self.content, *sizes)
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}


class Planned(nn.Module):
    """A program that C runs, in parts where functions of torch stand between.

    Args:
        program: the program.
        guard: as in `program_bytes`; parts have none.

    Attributes:
        content: the program's bytes, if C runs all of it.
        functions: the first function that C does not have; empty if C runs all.

    Raises:
        NotFused: the kernels can't run it, or qconv was installed without them.
    """

    content: Tensor | None

    def __init__(self, program: Program, guard: bool) -> None:
        super().__init__()
        if kernels() is None:
            raise NotFused("qconv was installed without its C kernels")
        self.program, self.shape = program, program.shape()
        self.channels, self.size = program.operations[0].channels, program.size
        self.functions = missing(program)
        whole = Part(program, [*range(1, len(program.operations))], (0,), program.outputs)
        self.steps = split(program) if self.functions else [whole]
        parts = [step for step in self.steps if isinstance(step, Part)]
        if not parts:
            raise NotFused(self.functions)
        self.plans = [_Plans(program_bytes(part.program, guard and part is whole), part is not whole) for part in parts]
        self.register_buffer("content", None if self.functions else self.plans[0].content)
        self._known: dict[Size, tuple[bool, str]] = {}

    def suits(self, size: Size) -> tuple[bool, str]:
        """Return whether C runs images of this size, and why it does not run all of the network, or is slower."""
        if size not in self._known:
            signs, others = self.program.multiplications(size)
            is_slow = signs > max(others, _MANY)
            slow = f"{signs:,} multiplications of floats with signs are faster in torch" if is_slow else ""
            self._known[size] = not slow and self._opens(size), slow or self.functions
        return self._known[size]

    def takes(self, input: Tensor) -> bool:
        """Whether the program is one for images of this shape."""
        return input.shape[1] == self.channels and self.size in (None, tuple(input.shape[2:]))

    def _opens(self, size: Size) -> bool:
        """Whether there is a first plan for images of this size: they may be too small for a window, or too large."""
        try:
            if isinstance(self.steps[0], Part):
                self.plans[0].of((size,))
        except ValueError:
            return False
        return True

    def forward(self, input: Tensor) -> Any:
        """Return what the network does, of one tensor, for float32 images, by an operator for tracing."""
        output = torch.ops.qconv.run_program(self.content, as_images(input), self.shape)
        return self.program.put_together([output])

    def run(self, input: Tensor) -> Any:
        """Return all outputs, without what an operator in Python costs."""
        if not self.functions:
            return self.program.put_together(self.plans[0](input))
        values, plans = {0: input}, iter(self.plans)
        for step in self.steps:
            if isinstance(step, Part):
                results = next(plans)(*(values[place] for place in step.inputs))
                values.update(zip(step.outputs, results, strict=True))
            else:
                self._operate(step, values)
        return self.program.put_together([values[place].contiguous() for place in self.program.outputs])  # as a plan's

    def values(self, input: Tensor) -> dict[int, Tensor]:
        """Return the values of all operations, by number, as `run` has them."""
        values, plans = {0: input}, iter(self.plans)
        for step in self.steps:
            if isinstance(step, Part):
                for place in step.places:
                    self._operate(place, values)
                form = next(plans).memory_format  # functions may round otherwise in another one
                values.update((place, values[place].contiguous(memory_format=form)) for place in step.outputs)
            else:
                self._operate(step, values)
        return values

    def _operate(self, place: int, values: dict[int, Tensor]) -> None:
        operation = self.program.operations[place]
        values[place] = run_operation(operation, *(values[given] for given in operation.inputs))
