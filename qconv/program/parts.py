"""Parts of a program that C runs, where functions of torch stand between them."""

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from .operations import ConvBits, ConvCodes, ConvFloats, Input, Program, Take, needs_torch


class Part(NamedTuple):
    """Some operations as a program of their own.

    Attributes:
        program: of them, with an `Input` for each value that they take.
        places: their numbers in the whole program.
        inputs: the numbers of these values.
        outputs: the numbers of the operations whose values others need.
    """

    program: Program
    places: list[int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def split(program: Program) -> list[Part | int]:
    """Return the steps of a program: parts for C, and the numbers of the operations that torch runs.

    Operations are one part if values go from one to the other without a function. Where none is a convolution, copies
    would cost more than torch does.
    """
    operations, levels, readers = program.operations, [0] * len(program.operations), program.readers()
    for place, operation in enumerate(operations):
        for given in operation.inputs:
            is_behind = needs_torch(operations[given]) and not needs_torch(operation)
            levels[place] = max(levels[place], levels[given] + is_behind)
    for place in range(len(operations) - 1, 0, -1):  # what is taken of a value is read with it, and not stored
        if isinstance(operations[place], Take) and place not in program.outputs:
            levels[place] = min(levels[reader] for reader in readers[place])
    steps: list[Part | int] = []
    for level in range(max(levels) + 1):
        here = [place for place in range(1, len(operations)) if levels[place] == level]
        functions = [place for place in here if needs_torch(operations[place])]
        parts: list[list[int]] = []
        for place in sorted({*here} - {*functions}):
            joined = [part for part in parts if not {*operations[place].inputs}.isdisjoint(part)]
            parts = [part for part in parts if part not in joined] + [sorted([*chain(*joined), place])]
        for part in parts:
            has_conv = any(isinstance(operations[place], ConvBits | ConvCodes | ConvFloats) for place in part)
            steps += [_part(program, part)] if has_conv else part
        steps += functions
    return steps


def _part(program: Program, places: list[int]) -> Part:
    operations, inside = program.operations, {*places}
    inputs = sorted({given for place in places for given in operations[place].inputs} - inside)
    read = {given for place, each in enumerate(operations) if place not in inside for given in each.inputs}
    outputs = [place for place in places if place in read or place in program.outputs]
    own = Program(operations[inputs[0]].channels)
    numbers = {inputs[0]: 0}
    for given in inputs[1:]:
        numbers[given] = own.add(Input(inputs=(), channels=operations[given].channels))
    for place in places:
        given = tuple(numbers[each] for each in operations[place].inputs)
        numbers[place] = own.add(replace(operations[place], inputs=given))
    own.outputs, own.ranks = tuple(numbers[place] for place in outputs), (4,) * len(outputs)
    return Part(own, places, tuple(inputs), tuple(outputs))
