"""Every tensor that can be reached from an engine's attributes, and what stands in the way of moving them.

The walk follows what an engine is made of: modules (parameters, buffers, plain attributes, hooks), containers, objects
of third parties (pipelines and other wrappers), bound methods and closures. It stops at the core, at other engines and
at objects of the standard library, from which the whole process could be reached. Properties are never called.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum, auto
from typing import Any, Literal

import torch
from attrs import define, field, frozen
from sie_core import DeviceBuffer, Engine

__all__ = ["Found", "Slot", "walk"]

IMAGE = "_sie_host_image"
"""The attribute under which an engine's host copy is kept; the walk does not look into it."""
_ROOTS = "offload_roots"

_LEAVES: frozenset[type] = frozenset(
    {int, float, str, bytes, bool, complex, type(None), type, range, slice, bytearray, memoryview, type(...)}
    | {types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.memory_format}
)
_NOTHING: dict[str, Any] = {}
_MODULE_OWN = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_FURTHER = frozenset({"sie_core", "numpy", *sys.stdlib_module_names})


class _Kind(IntEnum):
    LEAF = auto()
    TENSOR = auto()
    MODULE = auto()
    DICT = auto()
    LIST = auto()
    TUPLE = auto()
    FUNCTION = auto()
    METHOD = auto()
    PARTIAL = auto()
    OBJECT = auto()
    GRAPH = auto()
    OPAQUE_LORA = auto()
    SCRIPT = auto()


@frozen(eq=False)
class _Class:
    """What the walk has to know of a class."""

    kind: _Kind
    slots: tuple[str, ...] = ()
    attributes: bool = False
    """A container of a class of its own, which may have attributes beside its items."""
    buffer: bool = False
    """It may be a device buffer: it can be freed."""


_PLAIN_OBJECT = _Class(_Kind.OBJECT)


@frozen(eq=False)
class Slot:
    """Where an engine keeps a device buffer, so that another one can be put there."""

    owner: Any
    """The engine itself by a weak reference: what is kept of a slot is kept by the engine."""
    key: Any
    how: Literal["attribute", "item"]

    def put(self, value: Any) -> None:
        owner: Any = self.owner() if isinstance(self.owner, weakref.ref) else self.owner
        if self.how == "item":
            owner[self.key] = value
        else:
            object.__setattr__(owner, self.key, value)


@define(eq=False)
class Found:
    """What the walk found. ``problem``: why the engine can't be moved, if that can be said already."""

    tensors: list[torch.Tensor] = field(factory=list)
    tupled: dict[int, str] = field(factory=dict)
    """Tensors that sit in an immutable container, by id, and where."""
    buffers: list[DeviceBuffer] = field(factory=list)
    slots: dict[int, list[Slot]] = field(factory=dict)
    """By id of a buffer: where it is kept."""
    graphs: list[Any] = field(factory=list)
    """Objects whose ``clear()`` drops the CUDA graphs that they recorded."""
    problem: str | None = None

    def trouble(self, what: str) -> None:
        if self.problem is None:
            self.problem = what


def walk(engine: Engine) -> Found:
    """Look at everything the engine holds, and at its ``offload_roots``, if it declares any. Changes nothing."""
    walker = _Walker(engine)
    walker.run()
    return walker.found


_Entry = tuple[Any, Any, Any]  # a value, who holds it, and under which name

_known: weakref.WeakKeyDictionary[type, _Class] = weakref.WeakKeyDictionary()


class _Walker:
    def __init__(self, engine: Engine) -> None:
        self.found = Found()
        self._seen: set[int] = {id(engine)}
        self._classes: dict[type, _Class] = {}
        own = _Class(_Kind.OBJECT, _slots(type(engine)))
        self._stack: list[_Entry] = [
            (value, engine, name) for name, value in _attributes(engine, own) if name not in (IMAGE, _ROOTS)
        ]
        self._note_graph(engine, own)
        for root in _declared_roots(engine):
            self._stack.append((root, engine, _ROOTS))

    def run(self) -> None:
        stack, seen, classes = self._stack, self._seen, self._classes
        while stack:
            entry = stack.pop()
            value = entry[0]
            cls = type(value)
            if cls in _LEAVES:
                continue
            about = classes.get(cls)
            if about is None:
                about = classes[cls] = _about(cls)
            kind = about.kind
            if about.buffer and self._buffer(entry):
                continue
            if kind is _Kind.LEAF:
                continue
            if id(value) in seen:
                if kind is _Kind.TENSOR:
                    self._note_tuple(entry)
                continue
            seen.add(id(value))
            if kind is _Kind.MODULE:
                self._module(value)
            elif kind is _Kind.TENSOR:
                self._tensor(entry)
            else:
                self._other(entry, about)

    # --- by kind -----------------------------------------------------------------------------------

    def _module(self, module: torch.nn.Module) -> None:
        attributes = vars(module)
        push = self._stack.append
        for group in ("_modules", "_buffers", "_parameters"):
            for name, value in attributes.get(group, _NOTHING).items():
                if value is not None:
                    push((value, module, name))
        for name in _HOOKS:
            if hooks := attributes.get(name):
                push((hooks, module, name))
        for name in attributes.keys() - _MODULE_OWN:  # what every module has is most of it
            value = attributes[name]
            if type(value) not in _LEAVES:
                push((value, module, name))
            if name == "_hf_hook":
                self.found.trouble(
                    f"accelerate has put a hook on its {type(module).__name__}, and moves weights itself"
                )
            elif name == "graph":
                self._note_graph(module, _PLAIN_OBJECT)

    def _tensor(self, entry: _Entry) -> None:
        tensor: torch.Tensor = entry[0]
        self.found.tensors.append(tensor)
        self._note_tuple(entry)
        # A view holds on to the tensor that it looks into, whether or not anybody else does.
        if tensor._base is not None:
            self._stack.append((tensor._base, tensor, "_base"))
        if tensor.is_leaf and tensor.grad is not None:
            self._stack.append((tensor.grad, tensor, "grad"))
        if extra := vars(tensor):
            self._stack.extend((value, tensor, name) for name, value in extra.items())

    def _other(self, entry: _Entry, about: _Class) -> None:
        value, holder, key = entry
        kind, push = about.kind, self._stack.extend
        if kind is _Kind.DICT:
            push((item, value, name) for name, item in list(value.items()) if type(item) not in _LEAVES)
        elif kind in (_Kind.LIST, _Kind.TUPLE):
            push((item, value, index) for index, item in enumerate(list(value)) if type(item) not in _LEAVES)
        elif kind is _Kind.FUNCTION:
            push((content, value, name) for name, content in _captured(value))
        elif kind is _Kind.METHOD:
            push([(value.__self__, holder, key), (value.__func__, holder, key)])
        elif kind is _Kind.PARTIAL:
            push((part, value, "partial") for part in (value.func, *value.args, *value.keywords.values()))
        elif kind is _Kind.GRAPH:
            if key != "graph" or _clearer(holder, value) is None:
                self.found.trouble(f"nobody can clear the CUDA graph in {_place(entry)}")
        elif kind is _Kind.OPAQUE_LORA:
            self.found.trouble(f"the LoRA weights of {_place(entry)} can't be reached; declare them as {_ROOTS}")
        elif kind is _Kind.SCRIPT:
            self.found.trouble(f"{_place(entry)} is a TorchScript module, whose constants can't be moved")
        if kind is _Kind.OBJECT or about.attributes:
            self._note_graph(value, about)
            push((item, value, name) for name, item in _attributes(value, about) if type(item) not in _LEAVES)

    # --- notes -------------------------------------------------------------------------------------

    def _note_tuple(self, entry: _Entry) -> None:
        tensor, holder, _ = entry
        if isinstance(holder, tuple | frozenset):
            self.found.tupled.setdefault(id(tensor), _place(entry))

    def _note_graph(self, value: Any, about: _Class) -> None:
        graph = getattr(value, "__dict__", _NOTHING).get("graph")
        if graph is None and "graph" in about.slots:
            graph = dict(_attributes(value, about)).get("graph")
        clearer = _clearer(value, graph) if graph is not None else None
        if clearer is not None:
            self.found.graphs.append(clearer)

    def _buffer(self, entry: _Entry) -> bool:
        value, holder, key = entry
        if not isinstance(getattr(value, "view", None), memoryview):
            return False
        if id(value) not in self.found.slots:
            self.found.buffers.append(value)
        slots = self.found.slots.setdefault(id(value), [])
        how: Literal["attribute", "item"] = "item" if isinstance(holder, dict | list | deque) else "attribute"
        if isinstance(holder, tuple | set | frozenset) or key == _ROOTS:
            self.found.trouble(f"its device buffer in {_place(entry)} can't be replaced there")
        slots.append(Slot(weakref.ref(holder) if isinstance(holder, Engine) else holder, key, how))
        return True


def _clearer(holder: Any, graph: Any) -> Any | None:
    """Whose ``clear()`` drops the graph: the holder's own, or the graph's."""
    if callable(getattr(type(holder), "clear", None)) and not isinstance(holder, dict | list | set | deque):
        return holder
    return graph if callable(getattr(type(graph), "clear", None)) else None


def _place(entry: _Entry) -> str:
    value, holder, key = entry
    where = f"[{key!r}]" if isinstance(holder, dict | list | tuple | deque) else f".{key}"
    return f"{type(holder).__name__}{where} ({type(value).__name__})"


# --- classes -------------------------------------------------------------------------------------------


def _about(cls: type) -> _Class:
    about = _known.get(cls)
    if about is None:
        about = _known[cls] = _look_at(cls)
    return about


_KINDS: tuple[tuple[Any, _Kind], ...] = (
    (torch.Tensor, _Kind.TENSOR),
    (torch.jit.ScriptModule, _Kind.SCRIPT),
    (torch.nn.Module, _Kind.MODULE),
    ((dict, types.MappingProxyType), _Kind.DICT),
    ((list, set, deque), _Kind.LIST),
    ((tuple, frozenset), _Kind.TUPLE),
    (types.FunctionType, _Kind.FUNCTION),
    (types.MethodType, _Kind.METHOD),
    (functools.partial, _Kind.PARTIAL),
    ((Engine, type, types.ModuleType, Enum), _Kind.LEAF),
)


def _look_at(cls: type) -> _Class:
    root = cls.__module__.partition(".")[0]
    foreign = root not in _NO_FURTHER
    buffer = callable(getattr(cls, "free", None)) and not issubclass(cls, torch.Tensor)
    for classes, kind in _KINDS:
        if issubclass(cls, classes):
            contains = kind in (_Kind.DICT, _Kind.LIST, _Kind.TUPLE)
            return _Class(kind, _slots(cls), attributes=contains and foreign and not issubclass(cls, tuple))
    if root == "torch" and cls.__name__ == "CUDAGraph":
        return _Class(_Kind.GRAPH)
    if not foreign and cls is not types.SimpleNamespace:
        return _Class(_Kind.LEAF, buffer=buffer)
    slots = _slots(cls)
    if not slots and not cls.__dictoffset__ and "lora" in cls.__name__.lower():
        return _Class(_Kind.OPAQUE_LORA)
    return _Class(_Kind.OBJECT, slots, buffer=buffer)


def _slots(cls: type) -> tuple[str, ...]:
    """Names of the attributes that instances keep outside their ``__dict__``."""
    return tuple(
        name for base in cls.__mro__ for name, value in vars(base).items() if type(value) is types.MemberDescriptorType
    ) if cls.__flags__ & _HEAP_TYPE else ()  # fmt: skip


_HEAP_TYPE = 1 << 9  # made by a class statement: the members of built-in types are no slots


def _attributes(value: Any, about: _Class) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", _NOTHING).items())
    for name in about.slots:
        try:
            yield name, object.__getattribute__(value, name)
        except AttributeError:
            continue  # a slot that was never filled


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has captured: its closure, its defaults, and attributes put on it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # an empty cell
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default", default
    yield from vars(function).items()


def _declared_roots(engine: Engine) -> Iterable[Any]:
    roots: Any = getattr(engine, _ROOTS, ())
    return tuple(roots() if callable(roots) else roots)
