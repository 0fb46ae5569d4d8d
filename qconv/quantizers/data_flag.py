"""Quantizers that wait for data, and the flag that says whether they have had it."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .flags import Mark, flag_of, is_flag, is_readable, is_set, may_differ
from .part import Part


class NeedsData(Part):
    """A part that may wait for data. One that does sets ``self.calibrated = False`` in its constructor.

    This creates a float buffer of that name: 0 while it waits, above 0 once it is set. Averages of models, broadcasts
    and state dicts carry it like any other tensor. Read as an attribute it is a bool, and once True it is read from an
    accelerator again only if it may differ (`may_differ`).
    """

    _was_calibrated: bool = True  # the last known value of the buffer
    _flag_seen: Mark | None = None  # of the buffer then
    _share_told: bool = False  # whether `share_of_data` has read the buffer since it was loaded

    @property
    def needs_data(self) -> bool:
        """Whether its learned tensors start from data, no matter whether it has seen any yet (`calibrated`)."""
        return "calibrated" in self._buffers

    @property
    def calibrated(self) -> bool:
        """False while the learned tensors wait for data (`initialize`); in a compiled graph, the last known value."""
        return self._was_calibrated if torch.compiler.is_compiling() else self.had_data()

    @calibrated.setter
    def calibrated(self, value: bool) -> None:
        flag = self._buffers.get("calibrated")
        if flag is None:
            self._buffers["calibrated"] = flag_of(value)
        else:
            flag.fill_(float(value))
        self._know(value)

    def had_data(self) -> bool:
        """`calibrated`, read from the buffer unless known to be set. This breaks a graph that is being compiled."""
        flag = self._buffers.get("calibrated")
        if flag is not None and (not self._was_calibrated or self._may_have_lost(flag)):
            self._know(is_set(flag))
        return self._was_calibrated

    def _may_have_lost(self, flag: Tensor) -> bool:
        return not self._is_snapshot and is_readable(flag) and may_differ(flag, self._flag_seen, self.training)

    def _know(self, value: bool) -> None:
        if value != self._was_calibrated:  # to set an attribute of a module takes longer than to read the flag
            self._was_calibrated = value
        flag = self._buffers["calibrated"]
        if flag is not None and not flag.is_cpu:
            self._flag_seen = Mark.on(flag)

    def share_of_data(self) -> float | None:
        """The flag of its data if set, below 1 in an average that began before its data. Returned once, then None."""
        flag = self._buffers.get("calibrated")
        if flag is None or self._share_told or not self._was_calibrated or not is_readable(flag):
            return None
        share = flag.item()
        self._share_told = share > 0
        return share

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "calibrated" and isinstance(value, bool):  # torch.nn.Module would refuse a bool in a buffer's place
            type(self).calibrated.__set__(self, value)
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (value := self.__dict__.pop("calibrated", None)) is not None:  # a whole model pickled by an earlier version
            self.calibrated = value

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        key = f"{prefix}calibrated"
        if not self.needs_data:
            super().check_state(state_dict, prefix)
            return
        others = {name: value for name, value in state_dict.items() if name != key and name.startswith(prefix)}
        super().check_state(others, prefix)  # an earlier version saved a bool
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
        if key not in state_dict:
            missing_keys.append(key)
            return
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        # If a step was missing or had another shape, it was not loaded; the present one still waits for data.
        if len(missing_keys) + len(error_msgs) == before:
            self._load_flag(state_dict[key], local_metadata.get("assign_to_params_buffers", False))

    def _load_flag(self, value: bool | Tensor, assign: bool) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            return
        own = cast(Tensor, self._buffers["calibrated"])
        flag = torch.as_tensor(value, dtype=own.dtype).reshape(())
        if assign:
            self._buffers["calibrated"] = flag
        else:
            own.copy_(flag)
        self._know(is_set(flag))
        self._share_told = False
