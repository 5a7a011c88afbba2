"""Load a configuration: flags over environment over file over defaults, every problem at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

import attrs

from sie_core.config._fields import OptionInfo, describe_options
from sie_core.config._models import read_models
from sie_core.config._readers import AttrsReader
from sie_core.config._value import INVALID, Report, Value, Where, suggest, value_of
from sie_core.config._yaml import read_yaml
from sie_core.config.keys import check_keys, read_keys_file
from sie_core.config.model import SECTIONS, Config, Origin
from sie_core.errors import ConfigError, ConfigProblem

DEFAULT_FILE = "sie.yaml"
_CLIENT_VARIABLES = ("SIE_BASE_URL", "SIE_API_KEY", "SIE_CONFIG")
_READERS = {name: AttrsReader(cls) for name, cls in SECTIONS.items()}
_NO_FLAGS: Mapping[str, Any] = MappingProxyType({})


def options() -> Sequence[OptionInfo]:
    """Every option of the sections, in the order of the file; models' fields are in :func:`model_options`."""
    return tuple(info for name, cls in SECTIONS.items() for info in describe_options(cls, f"{name}."))


def load_config(
    path: Path | str | None = None,
    *,
    flags: Mapping[str, Any] = _NO_FLAGS,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read a configuration. ``path=None``: the file that ``SIE_CONFIG`` names, else ``sie.yaml`` here, else none.

    ``flags`` are by key (``server.port``) or by flag (``--port``); values are text as given, or typed already; ``None``
    counts as not given. An environment variable that is empty counts as not set. Relative paths start at the file's
    folder, in flags and variables at the working directory.

    Raises:
        ConfigError: with every problem found.
    """
    return _Loading(flags, os.environ if environ is None else environ).load(path)


class _Loading:
    def __init__(self, flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.flags = _by_key(flags)
        self.environ = environ
        self.problems: list[ConfigProblem] = []
        self.origins: dict[str, Origin] = {}
        self.here = Path.cwd()

    def load(self, path: Path | str | None) -> Config:
        file = self._file(path)
        report = self._report(str(file), file.parent) if file is not None else self._report("", self.here)
        root = Value("mapping", {}) if file is None else read_yaml(file, report)
        if root is None:
            raise ConfigError(self.problems)
        if root.kind != "mapping":
            report.mismatch(Where("", root.line, root.column), "a mapping with keys such as models:", root)
            raise ConfigError(self.problems)
        self._unknown_keys(root, report)
        sections = {name: self._section(name, root, report) for name in SECTIONS}
        sections["server"] = self._keys(sections["server"], root, report)
        models, values = self._models(root, report, sections)
        if sections["server"] is not INVALID:
            self._check_bind(sections["server"])
        if self.problems:
            raise ConfigError(sorted(self.problems, key=_order))
        return Config(
            **sections,
            models=models,
            path=file,
            warnings=(*self._slips(), *_exposed(sections["server"])),
            origins=self.origins,
            model_values=values,
        )

    def _file(self, path: Path | str | None) -> Path | None:
        if path is not None:
            return Path(path)
        named = self.environ.get("SIE_CONFIG")
        if named:
            return Path(named)
        default = Path(DEFAULT_FILE)
        # A link to nowhere counts: who made it meant the file to be read.
        return default if default.exists() or default.is_symlink() else None

    def _report(self, file: str, base: Path) -> Report:
        return Report(file, base if base.is_absolute() else self.here / base, self.problems)

    def _unknown_keys(self, root: Value, report: Report) -> None:
        homes = {key: f"{name}.{key}" for name, kind in _READERS.items() for key in kind.fields}
        known = [*SECTIONS, "models"]
        for key in root.data:
            if key not in known:
                hint = f", did you mean {homes[key]}?" if key in homes else suggest(key, known)
                hint = hint or "; there is " + ", ".join(known)
                report.add(Where("").key(key, root), f"unknown key {key!r}{hint}")

    # --- sections ----------------------------------------------------------------------------------

    def _section(self, name: str, root: Value, report: Report) -> Any:
        """A section from its three layers. Each layer is checked, also where another one wins."""
        kind = _READERS[name]
        value = root.data.get(name) or Value("mapping", {})
        where = Where("").key(name, root)
        before = len(self.problems)
        result: dict[str, Any] = {}
        fields = kind.read_fields(value, where, report)
        if fields is not INVALID and kind.build(fields, value, where, report) is not INVALID:
            result |= fields
            for key in fields:
                line, column = value.keys.get(key, (None, None))
                self.origins[f"{name}.{key}"] = Origin("file", f"{report.file}:{line}:{column}")
        for info in describe_options(kind.cls, f"{name}."):
            key = info.key.removeprefix(f"{name}.")
            for layer, label, raw in self._given(info):
                read = self._outside(kind, key, info, label, raw)
                if read is not INVALID:
                    result[key] = read
                    self.origins[info.key] = Origin(layer, label)
        return kind.cls(**result) if len(self.problems) == before else INVALID

    def _given(self, info: OptionInfo) -> list[tuple[Any, str, Any]]:
        """What environment and flags say about an option, the weaker first."""
        given: list[tuple[Any, str, Any]] = []
        if info.env is not None and self.environ.get(info.env):
            given.append(("environment", info.env, self.environ[info.env]))
        if self.flags.get(info.key) is not None:
            given.append(("flag", info.flag or info.key, self.flags[info.key]))
        return given

    def _outside(self, kind: AttrsReader, key: str, info: OptionInfo, label: str, raw: Any) -> Any:
        """Read a value of a flag or a variable, and check it as the field's own check does."""
        report = self._report(label, self.here)
        value = _from_text(raw, info.type) if isinstance(raw, str) else value_of(raw)
        parent = Value("mapping", {key: value})
        fields = kind.read_fields(parent, Where(info.key.rpartition(".")[0]), report)
        if fields is INVALID:
            if isinstance(raw, str) and raw.startswith("tcp://"):
                # Kubernetes sets SIE_PORT=tcp://... in every pod when a service is called sie.
                self.problems[
                    -1
                ].message += " (from Kubernetes, for a service named sie? set enableServiceLinks: false)"
            return INVALID
        built = kind.build(fields, parent, Where(info.key.rpartition(".")[0]), report)
        return INVALID if built is INVALID else fields[key]

    def _keys(self, server: Any, root: Value, report: Report) -> Any:
        """The server section with all API keys, those of the file after those in the list."""
        if server is INVALID:
            return server
        section = root.data.get("server")
        listed = section.data.get("api_keys") if section is not None and section.kind == "mapping" else None
        where = Where("server").key("api_keys", section) if listed is not None else Where("server.api_keys")
        entries = [
            (line, where.item(index, listed.data[index]) if listed is not None else where, report)
            for index, line in enumerate(server.api_keys)
        ]
        if server.api_keys_file is not None:
            of_file = self._report(str(server.api_keys_file), self.here)
            entries += [(line, place, of_file) for line, place in read_keys_file(server.api_keys_file, of_file)]
        before = len(self.problems)
        lines = check_keys(entries)
        return attrs.evolve(server, api_keys=lines) if len(self.problems) == before else INVALID

    def _check_bind(self, server: Any) -> None:
        if server.api_keys or server.allow_insecure_bind or is_loopback(server.host):
            return
        origin = self.origins.get("server.host", Origin("default"))
        problem = ConfigProblem(
            f"{server.host} lets other machines in, and there are no API keys: set server.api_keys_file, or allow it "
            "with server.allow_insecure_bind",
            path="server.host",
        )
        if origin.kind == "file":
            problem.file, line, column = origin.place.rsplit(":", 2)
            problem.line, problem.column = int(line), int(column)
        else:
            problem.file = origin.place
        self.problems.append(problem)

    # --- models ------------------------------------------------------------------------------------

    def _models(self, root: Value, report: Report, sections: Mapping[str, Any]) -> Any:
        value = root.data.get("models")
        if value is None:
            return (), {}
        where = Where("").key("models", root)
        self.origins["models"] = Origin("file", f"{report.file}:{where.line}:{where.column}")
        memory, requests, compute = sections["memory"], sections["requests"], sections["compute"]
        defaults = {
            "idle_evict_s": None if memory is INVALID else memory.idle_evict_s,
            "deadline_s": 120.0 if requests is INVALID else requests.deadline_s,
            "device": None if compute is INVALID else compute.device,
        }
        return read_models(value, where, report, defaults)

    def _slips(self) -> tuple[str, ...]:
        """Variables that look like ours and are none. Others may own the prefix too, so this is no error."""
        known = {info.env for info in options() if info.env} | set(_CLIENT_VARIABLES)
        found = []
        for name in sorted(self.environ):
            if name.startswith("SIE_") and name not in known:
                import difflib

                close = difflib.get_close_matches(name, known, 1, 0.85)
                if close:
                    found.append(f"the environment variable {name} is not one of SIE's: did you mean {close[0]}?")
        return tuple(found)


def _exposed(server: Any) -> list[str]:
    """What lets strangers in, for an operator who may not have meant it."""
    if server.api_keys:
        return []
    found = []
    if not is_loopback(server.host):
        found.append(
            f"no API keys: everybody who can reach {server.host} may use and administer this server; requests that "
            "call it by a name, not by an IP address, need that name in server.allowed_hosts"
        )
    if "*" in server.cors_origins:
        found.append(
            "no API keys, and server.cors_origins is '*': every web page that a browser on this machine opens may use "
            "and administer this server"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _by_key(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by key. Raises KeyError for one that is no option: a slip in the caller, not in the configuration."""
    infos = options()
    names = {info.key: info.key for info in infos} | {info.flag: info.key for info in infos if info.flag}
    return {names[name]: value for name, value in flags.items()}


def _order(problem: ConfigProblem) -> tuple[bool, str, int, int]:
    return (problem.line is None, problem.file, problem.line or 0, problem.column or 0)


_NONE = ("off", "none", "null")
_TRUE = {"1": True, "true": True, "yes": True, "on": True}
_WORDS = {**_TRUE, "0": False, "false": False, "no": False, "off": False}


def _from_text(text: str, tp: Any) -> Value:
    """A flag's or variable's text as a value of the kind that the option wants; any other stays text and is refused.

    Lists are written with commas.
    """
    if get_origin(tp) is tuple:
        words = [] if text.strip().lower() in _NONE else [part.strip() for part in text.split(",")]
        return Value("list", [Value("text", word) for word in words if word])
    members = set(get_args(tp)) | {tp}
    word = text.strip().lower()
    if type(None) in members and word in _NONE:
        return Value("null", None)
    if bool in members and word in _WORDS:
        return Value("bool", _WORDS[word])
    if int in members and word.removeprefix("-").isdecimal() and word.isascii() and len(word) < 40:
        return Value("int", int(word))
    if float in members:
        try:
            return Value("float", float(word))
        except ValueError:
            pass
    return Value("text", text)
