"""One saved optimizer against a live one, parameter by parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import delitem, setitem
from typing import TYPE_CHECKING, Any

from ..errors import DamagedError
from .rebuild import construct
from .skeleton import Node, key_text
from .words import join, noun, tensor_text

if TYPE_CHECKING:
    from .match import Matcher


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a saved tensor in a rebuilt container until its place is known."""

    index: int


class OptimizerMatch:
    """One saved optimizer against a live one, parameter by parameter."""

    def __init__(self, matcher: Matcher, saved: Node, optimizer: Any, name: str) -> None:
        self._matcher = matcher
        self._optimizer = optimizer
        self._name = name
        parts = construct(saved, name, TensorRef, None)
        self._state: dict[str, Any] = parts["state"]
        self._groups: list[dict[Any, Any]] = parts["param_groups"]
        self._other: dict[Any, Any] = parts.get("other", {})
        whole = isinstance(self._groups, list) and len(self._groups) == len(saved.about["groups"])
        if not whole or not all(isinstance(part, dict) for part in (self._state, self._other, *self._groups)):
            raise DamagedError("the stored optimizer is damaged", where=name)
        self._saved_names = [[parameter for parameter, _ in group] for group in saved.about["groups"]]
        self._saved_shapes = {name: tuple(shape) for group in saved.about["groups"] for name, shape in group}
        self._saved_named: bool = saved.about["named"]
        self._whole = matcher.patterns is None

    def run(self) -> None:
        matcher, optimizer = self._matcher, self._optimizer
        saved_of = self._pair_parameters()
        same_groups = len(self._groups) == len(optimizer.param_groups)
        for index, group in enumerate(optimizer.param_groups):
            options = {**group, **self._groups[index]} if same_groups else group
            for parameter in group["params"]:
                if id(parameter) in saved_of:
                    self._parameter(options, parameter, saved_of[id(parameter)])
        self._match_other()
        if same_groups:
            for index, (options, group) in enumerate(zip(self._groups, optimizer.param_groups, strict=True)):
                self._options(options, group, f"{self._name}.param_groups.{index}")
        if self._whole:
            matcher.call(self._name, lambda: matcher.torch.after_load(optimizer))

    def _pair_parameters(self) -> dict[int, str]:
        """For live parameters, by id, the name under which their state was saved; notes what has no counterpart."""
        matcher, optimizer = self._matcher, self._optimizer
        live_names, named = matcher.live.parameter_names(optimizer)
        counts = [len(names) for names in live_names]
        saved_counts = [len(names) for names in self._saved_names]
        if len(counts) != len(saved_counts):
            matcher.passed_over(
                f"{self._name}: expected {len(counts)} parameter groups, found {len(saved_counts)} in the checkpoint"
            )
        positional = not (named and self._saved_named)
        saved_flat = [name for names in self._saved_names for name in names]
        live_flat = [name for names in live_names for name in names]
        if set(live_flat) != set(saved_flat) and positional and counts == saved_counts:
            pairs = dict(zip(live_flat, saved_flat, strict=True))
        else:
            known = set(saved_flat)
            pairs = {name: name for name in live_flat if name in known}
            for name in live_flat:
                if name not in known and self._concerns(name):
                    matcher.passed_over(f"{self._name}: parameter {name!r} is missing in the checkpoint")
            for name in sorted(known - set(live_flat)):
                if self._concerns(name):
                    matcher.passed_over(f"{self._name}: unexpected, the checkpoint has state for a parameter {name!r}")
            if len(counts) == len(saved_counts):
                for index, (live_group, saved_group) in enumerate(zip(live_names, self._saved_names, strict=True)):
                    moved = (set(live_group) & known) ^ (set(saved_group) & set(live_flat))
                    for name in sorted(filter(self._concerns, moved)):
                        matcher.passed_over(f"{self._name}.param_groups.{index}: parameter {name!r} changed its group")
        result: dict[int, str] = {}
        for group, names in zip(optimizer.param_groups, live_names, strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                if name in pairs:
                    saved_name = pairs[name]
                    if tuple(parameter.shape) != self._saved_shapes[saved_name]:
                        if not self._concerns(saved_name):
                            continue
                        matcher.differ(
                            f"{self._name}.state.{saved_name}",
                            f"state for a parameter of shape {list(parameter.shape)}",
                            f"that of shape {list(self._saved_shapes[saved_name])}",
                        )
                        continue
                    result[id(parameter)] = saved_name
        return result

    def _concerns(self, parameter_name: str) -> bool:
        """Whether the patterns ask for the state of a parameter as such, and not only for one key of it."""
        return self._asked_for(f"{self._name}.state.{parameter_name}")

    def _asked_for(self, path: str) -> bool:
        return self._whole or self._matcher.selected(path) or self._matcher.selected(f"{path}.*")

    def _parameter(self, group: dict[str, Any], parameter: Any, saved_name: str) -> None:
        optimizer = self._optimizer
        name = f"{self._name}.state.{saved_name}"
        live = optimizer.state.get(parameter) if parameter in optimizer.state else None
        if saved_name not in self._state:
            if live is not None and self._whole:
                self._matcher.actions.append(partial(delitem, optimizer.state, parameter))
            return
        state = self._state[saved_name]

        def device(key: Any) -> Any:
            return self._matcher.torch.state_device(optimizer, group, parameter, key)

        new = self._adopt(state, live, name, device, None)
        if not isinstance(state, dict):
            if not self._asked_for(name):
                return
            self._matcher.actions.append(partial(setitem, optimizer.state, parameter, new))
            return

        def assign() -> None:
            if isinstance(live, dict):
                live.clear()
                live.update(new)
            else:
                optimizer.state[parameter] = new

        if new or self._whole:
            self._matcher.actions.append(assign)

    def _adopt(self, saved: Any, live: Any, name: str, device: Callable[[Any], Any], key: Any) -> Any:
        """The saved object with live tensors where they fit and new ones elsewhere; unselected parts stay live."""
        matcher = self._matcher
        if isinstance(saved, TensorRef):
            if not matcher.selected(name):
                return live
            if matcher.takes(live, saved.index) and (key != "step" or live.device == device(key)):
                matcher.fill(saved.index, live, name)
                return live
            return matcher.make(saved.index, device(key))
        if isinstance(saved, dict):
            inner = live if isinstance(live, dict) else {}
            adopted = {} if self._whole else dict(inner)
            for part, child in saved.items():
                new = self._adopt(child, inner.get(part), join(name, key_text(part)), device, part)
                if new is not None or child is None:
                    adopted[part] = new
            if type(saved) is dict:
                return adopted
            copied = saved.copy()
            copied.clear()
            copied.update(adopted)
            return copied
        if isinstance(saved, (list, tuple, deque)) and _has_tensor(saved):
            inner_items = list(live) if isinstance(live, (list, tuple, deque)) else []
            items = [
                self._adopt(child, inner_items[i] if i < len(inner_items) else None, f"{name}.{i}", device, key)
                for i, child in enumerate(saved)
            ]
            if isinstance(saved, tuple):
                return tuple.__new__(type(saved), items)
            return deque(items, saved.maxlen) if isinstance(saved, deque) else items
        return saved if matcher.selected(name) else live

    def _match_other(self) -> None:
        optimizer = self._optimizer
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        live_keys = [key for key in optimizer.state if id(key) not in parameters]

        for key, saved in self._other.items():
            path = f"{self._name}.other.{key_text(key)}"
            if not self._asked_for(path):
                continue
            new = self._adopt(saved, optimizer.state.get(key), path, lambda key: None, key)
            self._matcher.actions.append(partial(setitem, optimizer.state, key, new))
        if self._whole:
            for key in live_keys:
                if key not in self._other:
                    self._matcher.actions.append(partial(delitem, optimizer.state, key))

    def _options(self, saved: dict[Any, Any], group: dict[Any, Any], name: str) -> None:
        matcher = self._matcher
        defaults = getattr(self._optimizer, "defaults", {})
        for key, value in saved.items():
            option = f"{name}.{key}"
            if key == "params":
                continue
            if key not in group:
                if matcher.selected(option):
                    matcher.passed_over(f"{option}: unexpected, the optimizer has no such option")
                    if not matcher.strict:
                        self._set_option(group, key, value, None, option)
                continue
            self._set_option(group, key, value, group[key], option)
        for key in group:
            # An option that a newer torch has added keeps its default, as torch's own loading has it.
            known = key in saved or key in ("params", "param_names") or key in defaults
            if not known and matcher.selected(f"{name}.{key}"):
                matcher.passed_over(f"{name}.{key}: missing in the checkpoint, an option of the optimizer")

    def _set_option(self, group: dict[Any, Any], key: Any, saved: Any, live: Any, name: str) -> None:
        matcher = self._matcher
        tensor_here = isinstance(live, matcher.torch.Tensor)
        if isinstance(saved, TensorRef) != tensor_here and live is not None and matcher.selected(name):
            found = noun(type(saved).__name__)
            if isinstance(saved, TensorRef):
                found = matcher.saved.specs[saved.index].text
            matcher.differ(name, tensor_text(live) if tensor_here else noun(type(live).__name__), found)
            return
        if isinstance(saved, TensorRef) and tensor_here:
            if matcher.selected(name):
                matcher.fill(saved.index, live, name)
            return
        new = self._adopt(saved, live, name, lambda key: None, key)
        if matcher.selected(name):
            matcher.actions.append(partial(setitem, group, key, new))


def _has_tensor(item: Any) -> bool:
    if isinstance(item, (dict, list, tuple, deque)):
        return any(map(_has_tensor, item.values() if isinstance(item, dict) else item))
    return isinstance(item, TensorRef)
