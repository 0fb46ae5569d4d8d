"""The figure of a weight that oscillates, and of what stops it."""

import torch
from matplotlib.figure import Figure
from torch import nn

import qconv
from qconv.optim import Oscillations, dampening_penalty
from qconv.optim.step_rules import at

STEPS, WANTED = 160, 0.42


def train(dampening: float = 0.0, freeze: tuple[float, float] | None = None) -> tuple[list[float], list[float]]:
    """Train one weight with the levels …, −1, 0, 1, … towards 0.42; return it and its level after each step."""
    layer = qconv.QConv2d(1, 1, 1, bias=False, scheme=qconv.schemes.lsq(3, None))
    step = layer.weight_quantizer.tensors()[0]
    with torch.no_grad():
        step.fill_(1.0)
        layer.weight.fill_(-0.3)
    layer.weight_quantizer.requires_grad_(False)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    qconv.after_every_step(optimizer, layer)
    Oscillations(freeze=freeze, momentum=0.02, start=0.0).attach(layer, optimizer, total_steps=STEPS)
    weights, levels = [], []
    for index in range(STEPS):
        optimizer.zero_grad()
        loss = 0.5 * (layer(torch.ones(1, 1, 1, 1)) - WANTED).square().sum()
        if dampening:
            loss = loss + at((0.0, dampening), index / STEPS) * dampening_penalty(nn.Sequential(layer))
        loss.backward()
        optimizer.step()
        weights.append(float(layer.weight.detach()))
        levels.append(float(layer.quantized_weight()))
    return weights, levels


def draw_oscillations() -> Figure:
    """Draw latent weight and level over the steps: straight through, dampened and frozen."""
    figure = Figure(figsize=(6.6, 1.9), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    runs = {"straight through": train(), "dampened": train(dampening=1.0), "frozen": train(freeze=(0.2, 0.05))}
    for axes, (title, (weights, levels)) in zip(panels, runs.items(), strict=True):
        axes.step(range(STEPS), levels, color="#4c86e0", linewidth=0.7, label="level", where="post")
        axes.plot(weights, color="#e0762f", linewidth=1.2, label="latent weight")
        axes.axhline(WANTED, color="#8a8a8a", linewidth=0.8, linestyle=":")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step")
        axes.set_yticks([0, 0.5, 1])
    panels[2].legend(fontsize=7, loc="upper right")
    return figure
