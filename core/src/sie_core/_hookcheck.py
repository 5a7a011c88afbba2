"""Whether a plugin's version and hooks fit, told before it is registered and in words its author can act on."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import pluggy

from sie_core.errors import PluginBroken, PluginIncompatible
from sie_core.hookspecs import API_VERSION

__all__ = ["check_hooks", "check_version"]


def check_version(plugin: str, stated: object) -> PluginIncompatible | None:
    """The reason to refuse a plugin that states this ``sie_api``; ``None`` if there is none."""
    if type(stated) is int and stated == API_VERSION:
        return None
    if stated is None:
        text = f"it states no plugin API version: a module built for this one says sie_api = {API_VERSION}"
    elif type(stated) is not int:
        text = f"its sie_api is {stated!r}: it must be the integer {API_VERSION}"
    else:
        update = "update SIE" if stated > API_VERSION else "update the plugin"
        text = f"it was built for version {stated} of the plugin API and this is version {API_VERSION}: {update}"
    return PluginIncompatible(text, plugin=plugin)


def check_hooks(manager: pluggy.PluginManager, plugin: str, module: Any) -> tuple[str, ...]:
    """The names of the hooks that the plugin implements.

    Raises:
        PluginBroken: it implements an unknown hook, none at all, or one that can't be called as specified.
    """
    known = [name for name in vars(manager.hook) if not name.startswith("_")]
    hooks: list[str] = []
    problems: list[str] = []
    for attribute in dir(module):
        options = manager.parse_hookimpl_opts(module, attribute)
        if options is None:
            continue
        hook = options.get("specname") or attribute
        if hook not in known:
            if not options.get("optionalhook"):
                problems.append(_unknown(hook, known))
            continue
        hooks.append(hook)
        problems.extend(_faults(manager, hook, getattr(module, attribute), options))
    if not hooks and not problems:
        problems.append(_nothing(module, known))
    if problems:
        raise PluginBroken("; ".join(problems), plugin=plugin)
    return tuple(sorted(hooks))


def _unknown(hook: str, known: Sequence[str]) -> str:
    close = get_close_matches(hook, known, n=1, cutoff=0.7)
    advice = f"did you mean {close[0]!r}?" if close else f"the hooks are {', '.join(sorted(known))}"
    return f"there is no hook {hook!r}: {advice}"


def _faults(manager: pluggy.PluginManager, hook: str, function: Any, options: pluggy.HookimplOpts) -> list[str]:
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    offered = caller.spec.argnames if caller.spec else ()
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    wanted = [p.name for p in parameters if p.default is p.empty]
    idle = [p.name for p in parameters if p.default is not p.empty and p.name in offered]
    unknown = [name for name in wanted if name not in offered]
    faults: list[str] = []
    if unknown:
        takes = ", ".join(offered) or "no arguments"
        faults.append(f"hook {hook!r} has no argument {', '.join(map(repr, unknown))}: it takes {takes}")
    if idle:
        faults.append(f"hook {hook!r} gives {', '.join(map(repr, idle))} a default, so that it would never be passed")
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        faults.append(f"hook {hook!r} has keyword-only arguments: hooks are called by position")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        faults.append(f"hook {hook!r} is async: hooks are plain functions")
    if options.get("wrapper") or options.get("hookwrapper"):
        faults.append(f"hook {hook!r} is a wrapper: SIE's hooks have none")
    return faults


def _nothing(module: Any, known: Sequence[str]) -> str:
    unmarked = [name for name in known if inspect.isfunction(getattr(module, name, None))]
    if unmarked:
        return f"it implements no hook: {', '.join(unmarked)} lacks the @hookimpl of sie_core"
    return "it implements no hook"
