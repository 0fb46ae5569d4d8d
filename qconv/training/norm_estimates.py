"""Batch norms after training: restored to the network's own, and re-estimated for the test (`reestimate_bn=true`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning import LightningDataModule, Trainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .classifier import Classifier


@contextmanager
def batch_norms_kept(model: nn.Module) -> Iterator[None]:
    """Put back the batch norms of the model after a training, with what they have learned.

    With ``sync_batchnorm``, Lightning replaces batch norms, and at the end it leaves a class of its own, which packed
    files and frozen models do not know.
    """
    before = {name: each for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, _BatchNorm)}
    try:
        yield
    finally:
        for name, norm in before.items():
            trained = model.get_submodule(name)
            if trained is norm:
                continue
            for key, tensor in (*trained.named_parameters(recurse=False), *trained.named_buffers(recurse=False)):
                setattr(norm, key, tensor)
            norm.training = trained.training
            model.set_submodule(name, norm)


def reestimate_batch_norm(classifier: Classifier, data: LightningDataModule, trainer: Trainer) -> None:
    """Recompute the running statistics of batch norm as the mean over one epoch of training images.

    Everything else runs as in the test: stochastic quantizers round, and dropout passes everything. Batch norms that
    only training calls, such as in auxiliary classifiers, keep their statistics.
    """
    device = trainer.strategy.root_device  # a training that has ended leaves the model on the CPU
    classifier.to(device)

    norms = [module for module in classifier.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    modes = {module: module.training for module in classifier.modules()}
    momenta = [norm.momentum for norm in norms]
    before = [[buffer.clone() for buffer in norm.buffers(recurse=False)] for norm in norms]
    classifier.eval()
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.train().momentum = None  # the mean over all batches
        with torch.no_grad():
            for batch in data.train_dataloader():  # through the hooks that Lightning would call
                batch = data.transfer_batch_to_device(data.on_before_batch_transfer(batch, 0), device, 0)
                with trainer.precision_plugin.forward_context():
                    classifier(data.on_after_batch_transfer(batch, 0)[0])
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    for norm, buffers in zip(norms, before, strict=True):
        if norm.num_batches_tracked == 0:  # the test does not call it
            for buffer, kept in zip(norm.buffers(recurse=False), buffers, strict=True):
                buffer.copy_(kept)
            continue
        for statistic in (norm.running_mean, norm.running_var):
            if statistic is not None:  # every process has seen its part
                statistic.copy_(trainer.strategy.reduce(statistic, reduce_op="mean"))
