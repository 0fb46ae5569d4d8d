"""The integer program of `assign_bits`: the cheapest choices within the budgets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ground.extras import needed


@dataclass(frozen=True)
class Choice:
    """One scheme for one layer.

    Attributes:
        layer: the name of the layer.
        scheme: the name of the scheme.
        weight_bits: of the layer's weight.
        input_bits: of its input.
        cost: the expected increase of the loss, or what was measured in its place, see `assign_bits`.
        packed_bytes: of the layer in a packed file.
        bops: bit operations for one sample, as `qconv.summary` counts them.
    """

    layer: str
    scheme: str
    weight_bits: float
    input_bits: float
    cost: float
    packed_bytes: int
    bops: int


def check_budgets(others: Mapping[str, tuple[Choice, ...]], budgets: Mapping[str, tuple[int | None, int]]) -> None:
    """Raise a ValueError if the cheapest choices exceed a budget; arguments as for `cheapest`."""
    for figure, (most, rest) in budgets.items():
        least = rest + sum(min(getattr(choice, figure) for choice in choices) for choices in others.values())
        if most is not None and least > most:
            name = "max_bytes" if figure == "packed_bytes" else "max_bops"
            raise ValueError(
                f"{name} (={most}) must be at least {least}, the cost of the cheapest choices; {rest} of it has no "
                "choice, such as the first and the last layer: first_last='w8a8' makes those smaller"
            )


def cheapest(others: Mapping[str, tuple[Choice, ...]], budgets: Mapping[str, tuple[int | None, int]]) -> dict[str, int]:
    """Return the index of the choice for each layer, with the least total cost.

    Args:
        others: the choices for each layer.
        budgets: the most of a figure of `Choice`, None for any, and what is taken of it already.
    """
    with needed("qconv.assign_bits"):
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    check_budgets(others, budgets)
    flat = [choice for choices in others.values() for choice in choices]
    costs = np.array([choice.cost for choice in flat])
    if not np.isfinite(costs).all():
        worst = next(choice for choice in flat if not math.isfinite(choice.cost))
        what = f"{worst.layer} with {worst.scheme} costs {worst.cost}"
        raise FloatingPointError(f"{what}: the model's outputs or second derivatives have NaN or inf on these images")
    one = np.zeros((len(others), len(flat)))
    start = 0
    for place, choices in enumerate(others.values()):
        one[place, start : start + len(choices)] = 1
        start += len(choices)
    limits = [LinearConstraint(one, 1, 1)]
    for figure, (most, rest) in budgets.items():
        if most is not None:
            sizes = np.array([[float(getattr(choice, figure)) for choice in flat]])
            limits.append(LinearConstraint(sizes / max(most, 1), -np.inf, (most - rest) / max(most, 1)))
    best, total = None, np.inf
    while True:
        # The solver's tolerances are absolute: costs are measured by the largest that can still be part of the best.
        possible = costs <= total
        scaled = np.where(possible, costs, 0) / max(costs[possible].max(), 1e-300)
        bounds: Any = Bounds(0, possible.astype(float))  # pyright: ignore[reportArgumentType]
        found = milp(scaled, constraints=limits, integrality=np.ones(len(flat)), bounds=bounds)
        if found.x is None:
            break
        taken = np.round(found.x)
        if _is_above(taken.tolist(), flat, budgets):  # by less than the solver's tolerance: all but this one
            limits.append(LinearConstraint(taken[None], -np.inf, len(others) - 1))
        elif taken @ costs >= total:
            break
        else:
            best, total = taken, taken @ costs
    if best is None:
        raise ValueError(f"no assignment meets {', '.join(budgets)} together: {found.message}")
    taken = iter(best)
    return {name: [next(taken) for _ in choices].index(1) for name, choices in others.items()}


def _is_above(taken: Sequence[float], flat: Sequence[Choice], budgets: Mapping[str, tuple[int | None, int]]) -> bool:
    """Whether an assignment exceeds a budget, in whole numbers."""
    chosen = [choice for is_taken, choice in zip(taken, flat, strict=True) if is_taken]
    sums = {figure: rest + sum(getattr(choice, figure) for choice in chosen) for figure, (_, rest) in budgets.items()}
    return any(most is not None and sums[figure] > most for figure, (most, _) in budgets.items())
