"""The plugin manager: discovery, registration, and the calls that reach plugins.

A plugin that can't be used is left out and remembered with its reason; the others load. In strict mode each of these is
a start failure instead.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import pluggy
from attrs import evolve, field, frozen

from sie_core import hookspecs
from sie_core._discovery import FoundPlugin, declared_api, discover, import_plugin
from sie_core._hookanswers import problem_with
from sie_core._hookcheck import check_hooks, check_version
from sie_core._purehooks import PureHooks, SlowHook
from sie_core.adapter import Adapter, Device
from sie_core.errors import HookFailed, PluginBroken, PluginConflict, PluginError, PluginIncompatible, SieError
from sie_core.hookspecs import Command, VictimCandidate
from sie_core.types import ResidencyChanged

__all__ = ["AdapterEntry", "CatalogueFolder", "PluginInfo", "PluginState", "Plugins", "SlowHook"]

PluginState = Literal["loaded", "refused", "broken", "conflict"]
_BUILTIN = "core"
_FAREWELL_S = 5.0
"""What a plugin has to say at the end may take longer than what the event loop waits for in between."""
_T = TypeVar("_T")
_log = logging.getLogger("sie_core.plugins")


@frozen
class AdapterEntry:
    """An adapter on offer, and the name of the plugin that registered it."""

    name: str
    cls: type[Adapter]
    plugin: str


@frozen
class CatalogueFolder:
    """A folder of well-known models, and the name of the plugin that announced it."""

    folder: Path
    plugin: str


@frozen
class PluginInfo:
    """A plugin that was found, used or not.

    ``loaded``: in use (``reason`` may still name an adapter that it lost to a conflict). ``refused``: built for another
    API version. ``broken``: its code failed. ``conflict``: another plugin offers the same name.
    """

    name: str
    version: str
    distribution: str
    hooks: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    state: PluginState = "loaded"
    reason: str = ""
    traceback: str = field(default="", repr=False)


class _Registrar:
    """What one plugin's ``register_adapters`` gets."""

    def __init__(self, plugin: str, taken: Mapping[str, AdapterEntry]) -> None:
        self._plugin = plugin
        self._taken = taken
        self.added: dict[str, AdapterEntry] = {}
        self.catalogues: list[CatalogueFolder] = []
        self.conflict: PluginConflict | None = None
        self.contested: str | None = None

    def add(self, name: str, adapter: type[Adapter]) -> None:
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"an adapter's name is a text, not {name!r}")
        if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
            raise TypeError(f"adapter {name!r} is {adapter!r}: pass a subclass of sie_core.Adapter")
        other = self._taken.get(name) or self.added.get(name)
        if other is not None:
            whom = (
                f"plugins {other.plugin!r} and {self._plugin!r} both offer"
                if other.plugin != self._plugin
                else (f"plugin {self._plugin!r} offers twice")
            )
            self.contested = name
            self.conflict = PluginConflict(f"{whom} the adapter {name!r}: it is not used", plugin=self._plugin)
            raise self.conflict
        self.added[name] = AdapterEntry(name, adapter, self._plugin)

    def add_catalogue(self, folder: Path) -> None:
        if not isinstance(folder, Path):
            raise TypeError(f"a catalogue is a folder, given as a pathlib.Path, not {folder!r}")
        self.catalogues.append(CatalogueFolder(folder, self._plugin))


class Plugins:
    """The plugins of this process. Make one with :meth:`load`."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("sie")
        self._manager.add_hookspecs(hookspecs)
        self._infos: dict[tuple[str, str], PluginInfo] = {}
        self._order: list[str] = []
        self._adapters: dict[str, AdapterEntry] = {}
        self._catalogues: list[CatalogueFolder] = []
        self._problems: list[PluginError] = []
        self._chains: dict[tuple[str, str | None], tuple[pluggy.HookImpl, ...]] = {}
        self._strict = False
        self.pure = PureHooks(self._disable)

    @classmethod
    def load(cls, *, strict: bool | None = None, adapters: bool = True) -> Plugins:
        """Find, import and register every installed plugin.

        Args:
            strict: raise for a plugin that can't be used. ``None``: as ``SIE_STRICT_PLUGINS`` says.
            adapters: fire ``register_adapters`` (a command that only lists commands does without).

        Raises:
            PluginBroken, PluginConflict, PluginIncompatible: in strict mode; the other problems as notes.
        """
        self = cls()
        self._strict = _strict_by_environment() if strict is None else strict
        modules = self._import_all(_with_builtin(discover()))
        # pluggy calls the last one registered first; registered backwards, they are called in the order of their names.
        for info, module in reversed(modules):
            self._register(info, module)
        self._order = [info.name for info, _ in modules if self._manager.has_plugin(info.name)]
        if adapters:
            self._register_adapters()
        self._raise_if_strict()
        return self

    # --- what there is ---

    @property
    def hook(self) -> pluggy.HookRelay:
        """pluggy's relay: ``plugins.hook.choose_victims(candidates=…, needed=…)``."""
        return self._manager.hook

    @property
    def adapters(self) -> Mapping[str, AdapterEntry]:
        """Adapters on offer, by name."""
        return MappingProxyType(self._adapters)

    @property
    def catalogues(self) -> Sequence[CatalogueFolder]:
        """Folders of well-known models, in order of registration. Nothing in them has been read."""
        return tuple(self._catalogues)

    def info(self) -> list[PluginInfo]:
        """Every plugin that was found, used or not: the built-in one first, then by name."""
        return sorted(self._infos.values(), key=lambda info: (info.name != _BUILTIN, info.name, info.distribution))

    def implements(self, hook: str) -> bool:
        """Whether any plugin in use implements the hook."""
        return bool(self._chain(hook, None))

    # --- calls ---

    def ask(self, hook: str, /, *, owner: str | None, **arguments: Any) -> Any:
        """The first answer that is not ``None``: the owner plugin's, then the others' in order of registration.

        Callable from any thread.

        Raises:
            SieError: whatever of it a plugin raises.
            HookFailed: it raised something else, or its answer can't be used.
        """
        for impl in self._chain(hook, owner):
            try:
                answer = impl.function(*[arguments[name] for name in impl.argnames])
            except SieError:
                raise
            except (Exception, SystemExit) as error:
                raise HookFailed.by(error, hook, impl.plugin_name) from error
            if answer is not None:
                problem = problem_with(hook, answer)
                if problem is not None:
                    raise HookFailed(hook, plugin=impl.plugin_name, problem=problem)
                return answer
        return None

    def probe_devices(self, *, emulate: int | None = None) -> list[Device]:
        """The devices that all plugins found; of two with one name, the first. ``emulate``: bytes of a pretend one.

        Raises:
            HostOutOfMemory: the emulated device does not fit in RAM.
        """
        devices: dict[str, Device] = {}
        for found in self._collect("probe_devices", list, emulate=emulate):
            for device in found:
                devices.setdefault(device.name, device)
        return list(devices.values())

    def routes(self) -> list[Any]:
        """The Starlette routes of all plugins, in order of registration."""
        return [route for _, routes in self.routes_by_plugin() for route in routes]

    def routes_by_plugin(self) -> list[tuple[str, list[Any]]]:
        """The same with the name of the plugin that each lot is from."""
        found: list[tuple[str, list[Any]]] = []
        for impl in self._chain("register_routes", None):
            found += [(impl.plugin_name, routes) for routes in self._collect_of([impl], "register_routes", list)]
        self._raise_if_strict()
        return found

    def refuse(self, plugin: str, what: str) -> None:
        """Something that a plugin offers can't be used, the rest can: say so in the log and in its reason.

        Raises:
            PluginConflict: in strict mode.
        """
        error = PluginConflict(what, plugin=plugin)
        if self._strict:
            raise error
        _log.warning("plugin %r: %s", plugin, what)
        self._note(plugin, reason=what)

    def commands(self) -> list[Command]:
        """The sub-commands of all plugins; of two with one name, the first, and the other plugin is a conflict."""
        commands: dict[str, Command] = {}

        def accept(answer: Any) -> None:
            offered: list[Command] = list(answer)
            for command in offered:
                if not isinstance(command, Command):
                    raise TypeError(f"register_commands returned {command!r}: return sie_core.Command objects")
                if command.name in commands:
                    raise PluginConflict(f"another plugin offers the command {command.name!r} already")
            commands.update((command.name, command) for command in offered)

        self._collect("register_commands", accept)
        return list(commands.values())

    # Pure hooks: whatever a plugin does in one, it is logged with the plugin's name and goes no further.

    def rank(self, candidates: Sequence[VictimCandidate], needed: Mapping[str, int]) -> list[str] | None:
        """Fire ``choose_victims``: the first answer that is not ``None``."""
        for impl in self._chain("choose_victims", None):
            answer = self._tell("choose_victims", impl, candidates=candidates, needed=dict(needed))
            if answer is None:
                continue
            if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
                return [name for name in answer if isinstance(name, str)]
            _log.error(
                "choose_victims of plugin %r returned %r: return a list of model names, or None",
                *(impl.plugin_name, answer),
            )
        return None

    def notify(self, event: ResidencyChanged) -> None:
        """Fire ``on_residency_changed``."""
        for impl in self._chain("on_residency_changed", None):
            self._tell("on_residency_changed", impl, event=event)

    def shutdown(self) -> None:
        """Fire ``on_shutdown``."""
        for impl in self._chain("on_shutdown", None):
            self._tell("on_shutdown", impl, patience_s=_FAREWELL_S)

    def _tell(self, hook: str, impl: pluggy.HookImpl, *, patience_s: float | None = None, **arguments: Any) -> Any:
        taken = [arguments[name] for name in impl.argnames]
        return self.pure.call(impl.plugin_name, hook, impl.function, taken, patience_s=patience_s)

    def _disable(self, slow: SlowHook) -> None:
        self._chains.clear()
        self._note(slow.plugin, reason=f"its hook {slow.hook} is disabled: it did not return in time, three times")

    def _chain(self, hook: str, owner: str | None) -> tuple[pluggy.HookImpl, ...]:
        chain = self._chains.get((hook, owner))
        if chain is None:
            caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
            impls = [  # pluggy lists them last call first
                impl for impl in reversed(caller.get_hookimpls()) if not self.pure.is_disabled(impl.plugin_name, hook)
            ]
            chain = tuple(sorted(impls, key=lambda impl: impl.plugin_name != owner))
            self._chains[hook, owner] = chain
        return chain

    def _collect(self, hook: str, accept: Callable[[Any], _T], **arguments: Any) -> list[_T]:
        """Every plugin's answer; one that fails is left out from now on."""
        answers = self._collect_of(self._chain(hook, None), hook, accept, **arguments)
        self._raise_if_strict()
        return answers

    def _collect_of(
        self, impls: Sequence[pluggy.HookImpl], hook: str, accept: Callable[[Any], _T], **arguments: Any
    ) -> list[_T]:
        answers: list[_T] = []
        for impl in impls:
            try:
                answer = impl.function(*[arguments[name] for name in impl.argnames])
                if answer is not None:
                    answers.append(accept(answer))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._leave_out(impl.plugin_name, error, f"{hook} failed")
        return answers

    # --- registration ---

    def _import_all(self, found: Sequence[FoundPlugin]) -> list[tuple[PluginInfo, Any]]:
        modules: list[tuple[PluginInfo, Any]] = []
        for plugin in found:
            rivals = _rivals(plugin, found)
            if rivals:
                where = " and ".join(f"{rival.origin} ({rival.value})" for rival in rivals)
                error = PluginConflict(f"the plugin name {plugin.name!r} is offered by {where}", plugin=plugin.name)
                self._remember(_describe(plugin), error, "conflict")
                continue
            module = self._import(plugin)
            if module is not None:
                modules.append((_describe(plugin), module))
        return modules

    def _import(self, plugin: FoundPlugin) -> Any:
        info = _describe(plugin)
        try:
            if plugin.error:
                raise PluginBroken(plugin.error)
            module = import_plugin(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin that calls sys.exit() must not end the server
            declared = declared_api(plugin)
            stale = check_version(plugin.name, declared) if declared is not None else None
            self._remember(info, stale or _as_broken(plugin.name, error, "it failed to import"), cause=error)
            return None
        problem = check_version(plugin.name, getattr(module, "sie_api", None))
        if problem is not None:
            self._remember(info, problem)
            return None
        return module

    def _register(self, info: PluginInfo, module: Any) -> None:
        try:
            hooks = check_hooks(self._manager, info.name, module)
            twin = self._manager.get_name(module)
            if twin is not None:
                raise PluginConflict(f"the plugins {info.name!r} and {twin!r} are one and the same", plugin=info.name)
            self._manager.register(module, name=info.name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._manager.has_plugin(info.name):
                self._manager.unregister(name=info.name)
            self._remember(info, _as_broken(info.name, error, "its hooks can't be used"), cause=error)
            return
        self._infos[info.name, info.distribution] = evolve(info, hooks=hooks)

    def _register_adapters(self) -> None:
        contested: list[str] = []
        for impl in self._chain("register_adapters", None):
            registrar = _Registrar(impl.plugin_name, self._adapters)
            try:
                impl.function(*([registrar] if impl.argnames else []))
                if registrar.conflict is not None:
                    raise registrar.conflict
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if registrar.contested in self._adapters:
                    contested.append(str(registrar.contested))
                self._leave_out(impl.plugin_name, registrar.conflict or error, "register_adapters failed")
                continue
            self._adapters.update(registrar.added)
            self._catalogues += registrar.catalogues
        for name in dict.fromkeys(contested):  # a guess which of two was meant could serve another model's vectors
            entry = self._adapters.pop(name)
            self._note(entry.plugin, reason=f"its adapter {name!r} is offered by another plugin, too: it is not used")
        for plugin in self._order:
            self._note(plugin, adapters=tuple(n for n, entry in self._adapters.items() if entry.plugin == plugin))

    def _leave_out(self, plugin: str, error: BaseException, what: str) -> None:
        if plugin == _BUILTIN:
            raise error  # there is no server without it: what it says is for the operator
        info = next(info for info in self._infos.values() if info.name == plugin and info.state == "loaded")
        self._manager.unregister(name=plugin)
        self._order.remove(plugin)
        self._adapters = {name: entry for name, entry in self._adapters.items() if entry.plugin != plugin}
        self._catalogues = [catalogue for catalogue in self._catalogues if catalogue.plugin != plugin]
        self._chains.clear()
        self._remember(evolve(info, adapters=()), _as_broken(plugin, error, what), cause=error)

    def _note(self, plugin: str, **changes: Any) -> None:
        for key, info in self._infos.items():
            if info.name == plugin and info.state == "loaded":
                self._infos[key] = evolve(info, **changes)

    def _remember(
        self, info: PluginInfo, error: PluginError, state: PluginState | None = None, cause: BaseException | None = None
    ) -> None:
        if state is None:
            state = _state_for(error)
        trace = "".join(traceback.format_exception(cause)) if cause is not None and cause is not error else ""
        if cause is not None and cause is not error and error.__cause__ is None:
            error.__cause__ = cause
        self._infos[info.name, info.distribution] = evolve(info, state=state, reason=error.message, traceback=trace)
        self._problems.append(error)
        _log.warning("plugin %r (%s %s) is not used: %s", info.name, info.distribution, info.version, error.message)

    def _raise_if_strict(self) -> None:
        if not self._strict or not self._problems:
            return
        first, *others = self._problems
        for other in others:
            first.add_note(f"and: {other.message}")
        raise first


def _describe(plugin: FoundPlugin) -> PluginInfo:
    return PluginInfo(plugin.name, plugin.version, plugin.distribution)


def _with_builtin(found: list[FoundPlugin]) -> list[FoundPlugin]:
    """The built-in plugin first, once, whether or not the core's metadata are there to be found."""
    builtin = next((plugin for plugin in found if _is_builtin(plugin)), None)
    if builtin is None:
        from sie_core import __version__

        builtin = FoundPlugin(_BUILTIN, "sie_core.builtin", "sie-core", __version__)
    return [builtin, *(plugin for plugin in found if plugin is not builtin)]


def _is_builtin(plugin: FoundPlugin) -> bool:
    return plugin.name == _BUILTIN and plugin.module == "sie_core.builtin"


def _rivals(plugin: FoundPlugin, found: Sequence[FoundPlugin]) -> list[FoundPlugin]:
    """All that offer the plugin's name, when there are several. Nobody takes the built-in plugin's away."""
    rivals = [other for other in found if other.name == plugin.name and not other.error]
    return [] if len(rivals) < 2 or plugin.error or _is_builtin(plugin) else rivals


def _as_broken(plugin: str, error: BaseException, what: str) -> PluginError:
    if isinstance(error, PluginError):
        error.plugin = error.plugin or plugin
        return error
    text = str(error).strip() or "no message"
    return PluginBroken(f"{what}: {type(error).__name__}: {text}", plugin=plugin)


def _state_for(error: PluginError) -> PluginState:
    if isinstance(error, PluginIncompatible):
        return "refused"
    return "conflict" if isinstance(error, PluginConflict) else "broken"


def _strict_by_environment() -> bool:
    value = os.environ.get("SIE_STRICT_PLUGINS", "").strip().lower()
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"", "0", "false", "no", "off"}:
        return False
    raise PluginError(f"SIE_STRICT_PLUGINS is {value!r}: set it to 1 or 0")
