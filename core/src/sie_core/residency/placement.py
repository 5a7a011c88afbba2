"""From what an engine needs to where it may go: needs by account, and grants."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs
from attrs import frozen

from sie_core.adapter import AdmissionReserve, DeviceGrant, DeviceNeed, DeviceView, Grant
from sie_core.memory.ledger import Need
from sie_core.residency.record import Record
from sie_core.residency.roster import HOST, Roster

__all__ = ["Placement", "as_it_stands", "grant_for", "places", "regrant", "views"]


@frozen
class Placement:
    """One way to place an engine: the device of each rank, and the bytes needed on each account.

    ``staging`` is host memory that is needed only while the engine loads.
    """

    devices: tuple[str, ...]
    needs: tuple[Need, ...]
    staging: tuple[Need, ...] = ()

    @property
    def all_needs(self) -> tuple[Need, ...]:
        return self.needs + self.staging


def candidates(roster: Roster, record: Record) -> list[str]:
    """Devices the model may go to: the one it names; else every accelerator; the CPU only where there is none."""
    if record.spec.device is not None:
        return [record.spec.device] if record.spec.device in roster.devices else []
    accelerators = [name for name, device in roster.devices.items() if device.kind != "cpu"]
    return accelerators or list(roster.devices)


def views(roster: Roster, record: Record) -> list[DeviceView]:
    """What the adapter gets to see of them, most available first."""
    states = {state.account: state for state in roster.ledger.accounts()}
    found = []
    for name in candidates(roster, record):
        device = roster.devices[name]
        available = roster.ledger.available(name)
        used = device.used()
        found.append(
            DeviceView(
                name=name,
                kind=device.kind,
                total=device.total(),
                free=device.total() - used if used is not None else max(0, available),
                available=available,
                unrealised=states[name].unrealised,
            )
        )
    return sorted(found, key=lambda view: -view.available)


def places(roster: Roster, record: Record, reserve: AdmissionReserve, *, configured: bool = True) -> list[Placement]:
    """Every way to give each rank a device of its own. ``configured``: the model's ``runtime_headroom`` counts."""
    open_to = candidates(roster, record)
    fixed = [rank.device for rank in reserve.ranks if rank.device is not None]
    if any(device not in roster.devices for device in fixed):
        return []
    rest = [name for name in open_to if name not in fixed]
    found = []
    # Ranks that name no device are alike, so their devices are combined, not permuted.
    for chosen in itertools.combinations(rest, len(reserve.ranks) - len(fixed)):
        free = iter(chosen)
        way = tuple(rank.device or next(free) for rank in reserve.ranks)
        found.append(
            Placement(way, _needs(record if configured else None, reserve, way), _host(reserve.host_load_bytes))
        )
    return found


def _needs(record: Record | None, reserve: AdmissionReserve, way: Iterable[str]) -> tuple[Need, ...]:
    return tuple(
        Need(
            account=account,
            static=rank.min_bytes,
            context=rank.context_bytes,
            headroom=_headroom(record, rank),
            pool=reserve.headroom_pool,
        )
        for account, rank in zip(way, reserve.ranks, strict=True)
    ) + _host(reserve.host_bytes)


def _host(nbytes: int) -> tuple[Need, ...]:
    return (Need(account=HOST, static=nbytes),) if nbytes else ()


def _headroom(record: Record | None, rank: DeviceNeed) -> int:
    """The configuration's own figure wins over the adapter's estimate."""
    wish = record.spec.runtime_headroom if record is not None else None
    return rank.headroom_bytes if wish is None else wish


def grant_for(roster: Roster, placement: Placement, reserve: AdmissionReserve) -> tuple[tuple[Need, ...], Grant]:
    """What is booked, and what the engine is told: ``min``, and up to ``want`` from what is free anyway."""
    ledger = roster.ledger
    missing = ledger.shortfall(placement.all_needs)
    booked: list[Need] = []
    devices: dict[str, DeviceGrant] = {}
    for need, rank in itertools.zip_longest(placement.needs, reserve.ranks):
        if rank is None:
            booked.append(need)  # the host's share
            continue
        spare = 0 if missing else ledger.available(need.account) - need.static - need.context - need.headroom
        extra = max(0, min(rank.want_bytes - rank.min_bytes, spare))
        whole = Need(need.account, need.static + extra, need.context, need.headroom, need.pool)
        booked.append(whole)
        devices[need.account] = DeviceGrant(static_bytes=whole.static, headroom_bytes=whole.headroom)
    return tuple(booked), Grant(devices=devices, host_bytes=reserve.host_bytes)


def regrant(placement: Placement) -> Grant:
    """What a waking engine is told: what it was granted when it was loaded."""
    return Grant(
        devices={
            need.account: DeviceGrant(static_bytes=need.static, headroom_bytes=need.headroom)
            for need in placement.needs
        }
    )


def as_it_stands(roster: Roster, owner: str, grant: Grant) -> Grant:
    """The grant with how its devices stand now: when it was booked, the victims were still there.

    Free is what the driver calls free, the ledger's reserve included: what an engine measures that sizes itself.
    """
    ledger = roster.ledger
    states = {state.account: state for state in ledger.accounts()}
    mine = {account: (nbytes, 0) for account, nbytes in ledger.holding(owner).items()}
    for claim in ledger.claims(owner):
        charge, held = mine[claim.account]
        mine[claim.account] = charge, held + (claim.realised or 0)
    devices = {}
    for account, granted in grant.devices.items():
        charge, held = mine.get(account, (0, 0))
        others = max(0, states[account].unrealised - (charge - held))
        device = roster.devices.get(account)
        used = device.used() if device is not None else None
        if device is not None and used is not None:
            free = device.total() - used
        else:
            free = ledger.available(account) + charge - held + others  # what nobody is known to hold
        devices[account] = attrs.evolve(granted, free_bytes=max(0, free), others_unrealised_bytes=others)
    return attrs.evolve(grant, devices=devices)
