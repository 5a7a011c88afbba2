"""``sie models | ps | status | decisions | explain``: what the server holds, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.client import Client, Remote, model_path
from sie_core.cli.errors import CommandError, Exit, suggestion
from sie_core.cli.output import local_time, print_json, print_table, printable, size

__all__ = ["decisions", "explain", "models", "ps", "slow_hooks", "status"]

_NO_REMOTE = Remote()

_AWAY = frozenset({"unloaded", "failed"})
"""Residencies in which a model takes no memory and is not on its way to any."""


@command(
    "[OPTIONS] [NAME...]",
    "sie models",
    "sie models --json",
    "sie models --available --family cross-encoder",
    "sie models --available bge-m3 --yaml > sie.yaml",
)
def models(
    names: Annotated[
        tuple[str, ...], Parameter(name="NAME", negative="", show_default=False, help="With --available: only these.")
    ] = (),
    /,
    *,
    available: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Well-known models and how to configure them; asks no server."),
    ] = False,
    family: Annotated[str | None, Parameter(metavar="F", help="With --available: only this family.")] = None,
    yaml: Annotated[
        bool, Parameter(negative="", show_default=False, help="With --available: a configuration with them.")
    ] = False,
    remote: Remote = _NO_REMOTE,
) -> int:
    """List the models that the server knows, with what they take and give.

    With --available: well-known models that the installed adapters can serve, with the configuration each needs.
    """
    if available:
        from sie_core.cli.available import show_available

        return show_available(names, family, as_yaml=yaml, as_json=remote.json)
    if names or family is not None or yaml:
        raise CommandError(
            "NAME, --family and --yaml choose among the well-known models, and go with --available",
            exit_code=Exit.USAGE,
            code="USAGE",
            hint="for example: sie models --available --family dense",
        )
    with Client(remote) as client:
        body = client.get("/v1/models")
    rows = body.get("models", [])
    if remote.json:
        print_json(rows)
        return Exit.OK
    print_table(
        ("NAME", "STATE", "INPUTS", "OUTPUTS", "DIMS", "MAX LENGTH", "DEVICE MEMORY"),
        (
            (
                row["name"],
                row.get("residency") or row.get("state"),
                ", ".join(row.get("inputs") or ()),
                ", ".join(row.get("outputs") or ()),
                _dims(row.get("dims")),
                row.get("max_sequence_length"),
                size(row.get("device_bytes")),
            )
            for row in rows
        ),
        empty="The server knows no models: name some in sie.yaml.",
        right=("MAX LENGTH", "DEVICE MEMORY"),
        drops=("MAX LENGTH", "INPUTS", "DEVICE MEMORY", "DIMS", "OUTPUTS"),
    )
    _failures(rows)
    return Exit.OK


@command("[OPTIONS]", "sie ps", "sie ps --json")
def ps(*, remote: Remote = _NO_REMOTE) -> None:
    """List the models that are in memory or on their way, with the requests that use or await them."""
    with Client(remote) as client:
        body = client.get("/v1/status")
    rows = [row for row in body.get("models", []) if row["residency"] not in _AWAY]
    if remote.json:
        print_json(rows)
        return
    _print_models(rows, empty="No model is in memory: the first request for one loads it, or `sie load NAME`.")


@command("[OPTIONS]", "sie status", "sie status --json")
def status(*, remote: Remote = _NO_REMOTE) -> None:
    """Show the server's memory accounts and every model's state."""
    with Client(remote) as client:
        body = client.get("/v1/status")
    if remote.json:
        print_json(body)
        return
    print(f"SIE {printable(body.get('version', '?'))} at {client.url}, up {_span(body.get('uptime_s', 0))}\n")
    print_table(
        ("ACCOUNT", "CAPACITY", "USED", "PROMISED", "UNREALISED", "AVAILABLE"),
        ((account["account"], *(_signed(account.get(key)) for key in _SIZES)) for account in body.get("accounts", [])),
        right=("CAPACITY", "USED", "PROMISED", "UNREALISED", "AVAILABLE"),
        drops=("UNREALISED", "PROMISED"),
    )
    _host_cache(body.get("host_cache"))
    for line in (*_left_behind(body), *slow_hooks(body)):
        print(printable(line))
    print()
    _print_models(body.get("models", []), empty="No models are configured.")
    _waits(body.get("models", []))
    _failures(body.get("models", []))


@command("[OPTIONS]", "sie decisions", "sie decisions --model minilm --limit 5")
def decisions(
    *,
    model: Annotated[str | None, Parameter(metavar="NAME", help="Only what was decided for this model.")] = None,
    limit: Annotated[int, Parameter(metavar="N", help="How many to show, newest last.")] = 20,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Show why models were evicted, refused or dropped, newest last. Where keys are on, it takes an admin key."""
    with Client(remote) as client:
        found = sorted(client.get("/v1/admin/decisions").get("decisions", []), key=lambda one: one["at"])
        if model is not None:
            found = [one for one in found if one["model"] == model or model in (one.get("victims") or ())]
            if not found:
                _check_known(client, model)
    found = found[-limit:] if limit > 0 else []
    if remote.json:
        print_json(found)
        return
    print_table(
        ("AT", "MODEL", "ACTION", "NEEDED", "FREED", "VICTIMS", "REASON"),
        (
            (
                local_time(one["at"]),
                one["model"],
                one["action"],
                size(one.get("needed_bytes")),
                size(one.get("freed_bytes")),
                ", ".join(one.get("victims") or ()),
                one.get("reason"),
            )
            for one in found
        ),
        empty="Nothing had to be decided yet." if model is None else f"Nothing had to be decided for {model!r} yet.",
        right=("NEEDED", "FREED"),
        drops=("FREED", "NEEDED", "VICTIMS", "AT"),
        folds="REASON",
    )


@command("MODEL [OPTIONS]", "sie explain minilm", "sie explain minilm --json")
def explain(
    model: Annotated[str, Parameter(name="MODEL", negative="", help="Name of a model, as in `sie models`.")],
    /,
    *,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Say why a model is where it is: why it was evicted, what it freed, what would have kept it.

    Where keys are on, it takes an admin key.
    """
    with Client(remote) as client:
        body = client.get(model_path("/v1/admin/models", model, "explain"))
    if remote.json:
        print_json(body)
        return
    for sentence in body.get("explanation", []):
        print(printable(sentence))
    left = body.get("departure")
    if left:
        print(f"That was at {local_time(left['at'])}.")
    keep = body.get("would_have_kept_it") or []
    if keep:
        print("\nWhat would have kept it:")
    for line in keep:
        print(printable(f"  - {line}"))


def _check_known(client: Client, model: str) -> None:
    """Raises CommandError: the server has no such model."""
    names = [row["name"] for row in client.get("/v1/status").get("models", [])]
    if model not in names:
        hint = suggestion(model, names) or "`sie models` lists the models"
        raise CommandError(f"unknown model {model!r}", code="MODEL_NOT_FOUND", hint=hint)


# --- parts -----------------------------------------------------------------------------------------

_SIZES = ("capacity", "used", "promised", "unrealised", "available")


def _host_cache(tier: Mapping[str, int] | None) -> None:
    if not tier or not tier.get("budget"):
        print("\nHost tier: off; evicted models unload.")
        return
    idle = f", and {size(tier['idle'])} kept for the next copy" if tier.get("idle") else ""
    print(f"\nHost tier: {size(tier.get('used')).replace('-', '0')} of {size(tier['budget'])} in use{idle}.")


def _left_behind(status: Mapping[str, Any]) -> list[str]:
    return [
        f"Left behind on {account['account']} by closed engines of {model}: {size(nbytes)}"
        for account in status.get("accounts") or ()
        for model, nbytes in (account.get("left_behind") or {}).items()
    ]


def slow_hooks(status: Mapping[str, Any]) -> list[str]:
    """What the server says of hooks that did not return in time, a sentence each."""
    return [
        f"Plugin {slow['plugin']}: {slow['hook']} "
        + ("is disabled until the server is restarted: it " if slow["disabled"] else "")
        + f"did not return in time, {slow['overruns']} times."
        for slow in status.get("slow_hooks") or ()
    ]


def _print_models(rows: list[dict[str, Any]], *, empty: str) -> None:
    print_table(
        (
            "NAME",
            "STATE",
            "ADAPTER",
            "DEVICE",
            "DEVICE MEMORY",
            "HOST MEMORY",
            "LEASES",
            "QUEUED",
            "PINNED",
            "WAKE CHECK",
        ),
        (
            (
                row["name"],
                row["residency"] + _percent(row.get("progress")) + (" (leaving)" if row.get("leaving") else ""),
                row.get("adapter"),
                _device(row.get("device")),
                size(row.get("device_bytes")),
                size(row.get("host_bytes")),
                row.get("leases") or "-",
                row.get("queued") or "-",
                "yes" if row.get("pinned") else "-",
                _wake_check(row),
            )
            for row in rows
        ),
        empty=empty,
        right=("DEVICE MEMORY", "HOST MEMORY", "LEASES", "QUEUED"),
        drops=("WAKE CHECK", "ADAPTER", "PINNED", "DEVICE", "QUEUED", "LEASES", "HOST MEMORY", "DEVICE MEMORY"),
    )


def _wake_check(row: Mapping[str, Any]) -> str:
    """Which of its wakes are checked: what is set, what `auto` chose, or that there is no way to."""
    setting, checked = row.get("wake_check"), row.get("wake_checked")
    if checked is None:
        return "-"
    if _unchecked(row):
        return "unchecked"
    return f"{checked} (auto)" if setting == "auto" else str(checked)


def _unchecked(row: Mapping[str, Any]) -> bool:
    return row.get("wake_checked") == "never" != row.get("wake_check")


def _waits(rows: list[dict[str, Any]]) -> None:
    """Under the table: what stands between models and what they are about to do, and what they can't show."""
    lines = [printable(f"{row['name']} {row['waits_for']}.") for row in rows if row.get("waits_for")]
    lines += [printable(f"{row['name']}: wakes unchecked: its engine has no probe.") for row in rows if _unchecked(row)]
    if lines:
        print("", *lines, sep="\n")


def _failures(rows: list[dict[str, Any]]) -> None:
    """Under the table: what is wrong with the models that failed, in full."""
    broken = [(row["name"], row["last_error"]) for row in rows if row.get("last_error")]
    if broken:
        print()
    for name, error in broken:
        tries = error.get("attempts") or 0
        again = "1 attempt" if tries == 1 else f"{tries} attempts"
        if error.get("permanent"):
            again = "not tried again until the configuration changes"
        if error.get("error_class") == "EngineDied":
            again = "its engine died" if tries == 1 else f"its engine died {tries} times in a row"
        print(printable(f"{name}: {error.get('code')}: {error.get('message')} ({again})"))
        if error.get("details"):
            print(printable(error["details"], newlines=True))


def _dims(dims: object) -> str:
    """The one size of a model, or one for each of its outputs."""
    if isinstance(dims, Mapping):
        known = {kind: count for kind, count in dims.items() if count}
        if len(known) == 1:
            return str(next(iter(known.values())))
        return ", ".join(f"{kind} {count}" for kind, count in known.items())
    return "" if dims is None else str(dims)


def _device(device: object) -> str:
    return ", ".join(map(str, device)) if isinstance(device, list) else str(device or "")


def _percent(progress: object) -> str:
    if isinstance(progress, Mapping):
        progress = progress.get("fraction")
    return f" {progress:.0%}" if isinstance(progress, int | float) else ""


def _signed(nbytes: int | None) -> str:
    """Bytes that may be negative: an account whose device others filled up is short of bytes."""
    if nbytes is not None and nbytes < 0:
        return f"-{size(-nbytes)}"
    return size(nbytes)


def _span(seconds: float) -> str:
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(shown[:2]) or "0 s"
