"""Quantizers that wait for data, and the flag that records whether they have had it."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .flags import Mark, is_flag, is_readable, is_set, may_differ
from .part import Part

START = 2.0**-24
"""The flag of learned tensors that have a start, from the weight or from data, and no gradient yet. Float16 has it."""


class NeedsData(Part):
    """A part whose learned tensors start from data or from the weight, and are fresh until the first backward.

    One buffer says so, ``calibrated``: 0 while they wait for data, `START` once they have a start, 1 from the first
    backward, `qconv.calibrate` or a checkpoint on. Up to `START` they are fresh: each forward in training sets them
    again, from its weight or input. So a dry run decides nothing. A part that waits for data sets ``self.calibrated =
    False`` in its constructor; layers give the flag to what starts from their weight (`start_`).

    It is a float: averages of models, broadcasts and state dicts carry it like any other tensor. As an attribute it is
    a bool, whether there is a start, which is read again from an accelerator only if it may differ (`may_differ`).
    """

    _was_calibrated: bool = True  # the last known values of the buffer: whether it is above 0, and at most `START`
    _was_fresh: bool = False
    _flag_seen: Mark | None = None  # of the buffer then

    @property
    def needs_data(self) -> bool:
        """Whether the learned tensors start from data, whether or not any has been seen (`calibrated`)."""
        return "calibrated" in self._buffers

    @property
    def calibrated(self) -> bool:
        """False while the learned tensors wait for data (`initialize`); in a compiled graph, the last known value."""
        if not torch.compiler.is_compiling():
            self._read_flag()
        return self._was_calibrated

    @calibrated.setter
    def calibrated(self, value: bool) -> None:
        self._set_flag(float(value))

    @property
    def is_fresh(self) -> bool:
        """Whether the next forward in training sets the learned tensors; in a compiled graph, the last known value."""
        return self._was_fresh if torch.compiler.is_compiling() else self.reads_fresh()

    def reads_fresh(self) -> bool:
        """`is_fresh`, read from the buffer unless known not to be. This breaks a graph that is being compiled."""
        self._read_flag()
        return self._was_fresh

    def start_(self) -> None:
        """Note that the learned tensors are initialized, and still fresh."""
        self._set_flag(START)

    def settle_(self) -> None:
        """Note that training changes the learned tensors from now on, unless they still wait for data."""
        if self._was_fresh and self._was_calibrated:
            self._set_flag(1.0)

    def _set_flag(self, value: float) -> None:
        flag = self._buffers.get("calibrated")
        if flag is None:
            self._buffers["calibrated"] = torch.tensor(value)
        else:
            flag.fill_(value)
        self._know(value > 0, value <= START)

    def _read_flag(self) -> None:
        flag = self._buffers.get("calibrated")
        if flag is None or self._is_snapshot:
            return
        if torch.compiler.is_compiling():
            again = self._was_fresh
        else:
            again = is_readable(flag) and (self._was_fresh or may_differ(flag, self._flag_seen, self.training))
        if again:
            self._know(*_read(flag))

    def _know(self, calibrated: bool, fresh: bool) -> None:
        if (calibrated, fresh) != (self._was_calibrated, self._was_fresh):  # attributes of a module are set slowly
            self._was_calibrated, self._was_fresh = calibrated, fresh
        flag = self._buffers["calibrated"]
        if flag is not None and not flag.is_cpu:
            self._flag_seen = Mark.on(flag)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "calibrated" and isinstance(value, bool):  # torch.nn.Module would refuse a bool in a buffer's place
            type(self).calibrated.__set__(self, value)
        else:
            super().__setattr__(name, value)

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        key = f"{prefix}calibrated"
        if not self.needs_data:
            super().check_state(state_dict, prefix)
            return
        others = {name: value for name, value in state_dict.items() if name != key and name.startswith(prefix)}
        super().check_state(others, prefix)  # the flag may be a bool
        value = state_dict.get(key, False)
        if not is_flag(value):
            raise ValueError(f"{key} (={value}) in the checkpoint must be True or False")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # If a float checkpoint holds nothing of the quantizer, the layer sets it from the loaded weight.
        flag = self._buffers.get("calibrated")
        before = len(missing_keys) + len(error_msgs)
        # It is loaded last, since it depends on the other tensors. In its place it stays: averages of models and
        # broadcasts between processes pair buffers up by their order.
        self._non_persistent_buffers_set.add("calibrated")
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._non_persistent_buffers_set.discard("calibrated")
        key = f"{prefix}calibrated"
        if flag is None or not any(other.startswith(prefix) for other in state_dict):
            return
        if key not in state_dict and getattr(self, "roles", ()) != ("weight",):
            missing_keys.append(key)
            return
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        # If a step was missing or had another shape, it was not loaded; the present one still waits for data.
        if len(missing_keys) + len(error_msgs) == before:
            # A dictionary of parameters alone has no flag.
            self._load_flag(state_dict.get(key, True), local_metadata.get("assign_to_params_buffers", False))

    def _load_flag(self, value: bool | Tensor, assign: bool) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            return
        own = cast(Tensor, self._buffers["calibrated"])
        flag = torch.as_tensor(value, dtype=own.dtype).reshape(())
        if assign:
            self._buffers["calibrated"] = flag
        else:
            own.copy_(flag)
        self._know(*_read(flag))


def _read(flag: Tensor) -> tuple[bool, bool]:
    """Return whether the tensors are initialized, and whether they are fresh."""
    return (True, False) if is_set(flag, START) else (is_set(flag), True)
