"""How much of a device an engine gets, and the flags that make it take that and no more.

An engine measures ``pre``, the memory that is free after its context ``c``, as the least of all ranks, and takes
``F × pre`` for weights and KV cache. Graphs, workspaces and activations ``g`` and the declared headroom ``h`` come out
of the rest, and so does what other residents were promised and have not taken yet, ``x``. So bytes come first::

    promise = c + static + g + h
    static  = min(granted, free - c - x - h - g)               refused below weights + the smallest KV pool
    F       = static / (free - c)                              rounded down to three digits
    F       = 1 - max(x + h + g) / min(free - c)               of several ranks, if that is less

Once it is known what a token takes, ``--max-total-tokens`` bounds the engine and no window is needed: others load, wake
and free beside it. They can take all but what was promised to it, so ``F`` is then rounded up from the least that
``pre`` can be: ``static / (static + g + h)``. A profile's own F bounds the bytes there as everywhere, not the flag.

``c`` and ``g`` are booked as the context: the core replaces an adapter's headroom by ``runtime_headroom`` where that is
configured, and ``g`` must not go with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

from attrs import field, frozen
from sie_core import (
    AdmissionReserve,
    DeviceGrant,
    DeviceNeed,
    DeviceOutOfMemory,
    DeviceView,
    NeverFits,
    ReserveOutdated,
    ResourceExhausted,
    format_bytes,
)

from sie_adapters_sglang._costs import Costs

__all__ = ["Demand", "Launch", "claim_overrun", "promise", "reserve", "size_launch"]

_log = logging.getLogger("sie.sglang")
_STEPS = 1000
_UNSURE = 16 * 1024**2  # two figures of /server_info, each rounded to a hundredth of a GiB
_CPU_TOKENS = 16384
_CPU_STEPS = 900  # what it measures there is the machine's RAM, in which its own process grows; the cap bounds it
_BALANCE = 0.9
_IMBALANCE_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"


@frozen(kw_only=True)
class Demand:
    """What a model asks for. Sizes in bytes, on each of ``ranks`` devices.

    ``min_tokens``: the smallest KV pool it is any use with. ``max_total_tokens`` and ``mem_fraction_static`` are the
    profile's own and upper bounds; the core's choice of ``headroom_bytes`` (``runtime_headroom``) wins.
    ``capped``: whether a token cap bounds all that the engine sizes itself, which a state beside the KV cache is not.
    """

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    headroom_bytes: int = 0
    ranks: int = 1
    min_tokens: int = 4096
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    page_tokens: int = 1
    host_bytes: int = 0
    host_load_bytes: int = 0
    capped: bool = True

    def weights(self, costs: Costs) -> int:
        """Measured, or what the checkpoint says."""
        return self.weights_bytes if costs.weights is None else costs.weights

    def per_token(self, costs: Costs) -> int:
        """The same of a token of KV cache."""
        return self.kv_bytes_per_token if costs.bytes_per_token is None else costs.bytes_per_token

    def least(self, costs: Costs) -> int:
        """Weights and the smallest KV pool."""
        tokens = self.min_tokens if self.max_total_tokens is None else min(self.min_tokens, self.max_total_tokens)
        return self.weights(costs) + tokens * self.per_token(costs)

    def cap(self, kind: str) -> int | None:
        """Tokens that it wants at most; ``None``: as many as there is room for."""
        if self.max_total_tokens is None and kind == "cpu":
            return max(self.min_tokens, _CPU_TOKENS)  # there "all that is free" would be the machine's RAM
        return self.max_total_tokens

    def known(self, costs: Costs) -> bool:
        """Whether an earlier launch showed what a token cap comes to in bytes."""
        return self.capped and costs.weights is not None and costs.bytes_per_token is not None


def promise(context: int, static: int, beside: int, headroom: int) -> int:
    """All that an engine may ever hold on one device: ``c + static + g + h``."""
    return context + static + beside + headroom


# --- before admission ------------------------------------------------------------------------------


def reserve(demand: Demand, costs: Costs, views: Sequence[DeviceView]) -> AdmissionReserve:
    """What to ask the ledger for. The first launch of a model sizes itself; later ones have a token cap instead.

    Raises:
        NeverFits: more than the largest of the devices has when it is empty, or more than the profile's own F allows.
    """
    views = views or [DeviceView("cpu", "cpu", 0, 0, 0)]
    least = demand.least(costs)
    # F is rounded down: what that takes away must not come off the smallest pool.
    rounding = max(view.total for view in views) // _STEPS + 1
    _check_fits(demand, costs, views, least + rounding)
    largest = max(views, key=lambda view: view.available)
    beside = costs.context + costs.beside + demand.headroom_bytes
    # Where others have to go first, nobody can tell yet how much will be free: the core grants what then is.
    roomy = largest.available >= least + rounding + beside
    wants = [max(view.total for view in views) - beside]
    bound = _thousandths(demand.mem_fraction_static)
    if bound is not None:
        wants.append(max((view.free if roomy else view.total) - costs.context for view in views) * bound // _STEPS)
    cap = demand.cap(largest.kind)
    if cap is not None:
        wants.append(demand.weights(costs) + cap * demand.per_token(costs) + rounding)
    need = DeviceNeed(
        min_bytes=least + rounding,
        want_bytes=max(least + rounding, min(wants)),
        context_bytes=costs.context + costs.beside,
        headroom_bytes=demand.headroom_bytes,
    )
    return AdmissionReserve(
        ranks=(need,) * demand.ranks,
        host_bytes=demand.host_bytes,
        host_load_bytes=demand.host_load_bytes,
        self_sizing=not demand.known(costs),
    )


def _check_fits(demand: Demand, costs: Costs, views: Sequence[DeviceView], least: int) -> None:
    largest = max(views, key=lambda view: view.total)
    if not largest.total:
        return  # nobody can tell: the ledger decides
    needed = promise(costs.context, least, costs.beside, demand.headroom_bytes)
    if needed > largest.total:
        raise NeverFits(
            f"model {demand.name!r} needs {format_bytes(needed)} on {largest.name}, which has "
            f"{format_bytes(largest.total)} in all: {_parts(demand, costs)}",
            account=largest.name,
            needed=needed,
            capacity=largest.total,
        )
    bound = _thousandths(demand.mem_fraction_static)
    most = (largest.total - costs.context) * bound // _STEPS if bound is not None else least
    if most < demand.least(costs):
        raise NeverFits(
            f"model {demand.name!r} has mem_fraction_static {demand.mem_fraction_static}, which is "
            f"{format_bytes(most)} of an empty {largest.name} and less than {_smallest(demand, costs)}: raise it",
            account=largest.name,
            needed=demand.least(costs),
            capacity=most,
        )


def _smallest(demand: Demand, costs: Costs) -> str:
    weights, least = demand.weights(costs), demand.least(costs)
    return f"its weights ({format_bytes(weights)}) and the smallest KV cache ({format_bytes(least - weights)})"


def _parts(demand: Demand, costs: Costs) -> str:
    return (
        f"{_smallest(demand, costs)}, {format_bytes(costs.context)} of context, {format_bytes(costs.beside)} of graphs "
        f"and activations, {format_bytes(demand.headroom_bytes)} of runtime_headroom; use a smaller model, "
        "less headroom, or a larger device"
    )


# --- at launch -------------------------------------------------------------------------------------


@frozen
class Launch:
    """The figures of one launch. ``static_bytes``: the most that weights and KV cache come to, on each rank."""

    thousandths: int
    static_bytes: int
    max_total_tokens: int | None = None
    environment: Mapping[str, str] = field(factory=dict)

    @property
    def fraction(self) -> float:
        """``--mem-fraction-static``."""
        return self.thousandths / _STEPS

    def flags(self) -> tuple[str, ...]:
        """For the engine's command line."""
        flags = ("--mem-fraction-static", f"{self.fraction:.3f}")
        return flags if self.max_total_tokens is None else (*flags, "--max-total-tokens", str(self.max_total_tokens))


def size_launch(
    demand: Demand, costs: Costs, grants: Mapping[str, DeviceGrant], *, kinds: Iterable[str] = ("cuda",)
) -> Launch:
    """The flags for what was granted, one grant a rank. ``kinds``: of the devices.

    Raises:
        ReserveOutdated: less than the weights and the smallest KV pool is left of it. Another launch of the same model
            may have shown since the admission what it takes.
    """
    if not grants:
        raise ResourceExhausted(f"model {demand.name!r} was granted no device")
    before = {account: grant.free_bytes - costs.context for account, grant in grants.items()}
    pre = max(0, min(before.values()))
    bound = _thousandths(demand.mem_fraction_static)
    known = demand.known(costs)
    if known:
        # What the others have taken by now does not matter: the cap keeps to the bytes that are booked.
        most = min(grant.static_bytes for grant in grants.values())
        most = most if bound is None else min(most, bound * pre // _STEPS)
        steps = 0
    else:
        steps = _share(costs, grants, before, pre)
        steps = steps if bound is None else min(steps, bound)
        most = steps * pre // _STEPS
    if most < demand.least(costs):
        raise _too_little(demand, costs, grants, most, bound is not None and most == bound * pre // _STEPS)
    cpu = "cpu" in kinds
    cap = _token_cap(demand, costs, most, "cpu" if cpu else "")
    if cap is not None:
        most = min(most, demand.weights(costs) + cap * demand.per_token(costs))
    if known:
        assured = min(grant.static_bytes + grant.headroom_bytes for grant in grants.values()) + costs.beside
        steps = min(_STEPS - 1, -(-most * _STEPS // assured))
    if cpu:
        steps = max(steps, _CPU_STEPS if bound is None else bound)
    uneven = len(grants) > 1 and pre < _BALANCE * max(before.values())
    return Launch(steps, most, cap, {_IMBALANCE_CHECK: "0"} if uneven else {})


def _share(costs: Costs, grants: Mapping[str, DeviceGrant], before: Mapping[str, int], pre: int) -> int:
    """F in thousandths, where nothing but F bounds the engine."""
    taken = {
        account: grant.others_unrealised_bytes + grant.headroom_bytes + costs.beside
        for account, grant in grants.items()
    }
    static = min(min(grant.static_bytes, before[account] - taken[account]) for account, grant in grants.items())
    if pre <= 0 or static <= 0:
        return 0
    steps = static * _STEPS // pre
    if len(grants) > 1:
        steps = min(steps, _STEPS - -(-max(taken.values()) * _STEPS // pre))
    return max(0, min(steps, _STEPS - 1))


def _token_cap(demand: Demand, costs: Costs, static: int, kind: str) -> int | None:
    """``--max-total-tokens``: what was asked for, and where a token's bytes are known no more than was granted."""
    wanted = demand.cap(kind)
    if not demand.known(costs) and kind != "cpu":
        return wanted
    room = (static - demand.weights(costs)) // max(1, demand.per_token(costs))
    tokens = room if wanted is None else min(room, wanted)
    return tokens // demand.page_tokens * demand.page_tokens or tokens


def _too_little(
    demand: Demand, costs: Costs, grants: Mapping[str, DeviceGrant], most: int, bounded: bool
) -> ReserveOutdated:
    account, grant = min(grants.items(), key=lambda item: item[1].free_bytes)
    advice = "raise mem_fraction_static, or unload something" if bounded else "unload something, or try again later"
    return ReserveOutdated(
        f"model {demand.name!r} would get {format_bytes(most)} on {account} and needs {_smallest(demand, costs)}: of "
        f"{format_bytes(grant.free_bytes)} free, {format_bytes(grant.others_unrealised_bytes)} are promised to others, "
        f"{format_bytes(grant.headroom_bytes)} are its headroom and {format_bytes(costs.context + costs.beside)} go to "
        f"its context, graphs and activations; {advice}",
        retry_after_s=10.0,
    )


def _thousandths(fraction: float | None) -> int | None:
    # 0.29 * 1000 is 289.99…: the digits that were written count.
    return None if fraction is None else math.floor(Decimal(str(fraction)) * _STEPS)


# --- after launch ----------------------------------------------------------------------------------


def claim_overrun(
    name: str,
    costs: Costs,
    grants: Mapping[str, DeviceGrant],
    taken: Mapping[str, int],
    grow: Callable[[str, int], bool],
) -> None:
    """Have the ledger told, by ``request_growth``, where an engine took more than it was promised.

    It takes what others give back while it loads, because it measures again after its weights. ``taken``: by account,
    bytes of its context (where that can be told), weights and KV cache; ``costs``: those it was sized with. Call it
    before the load ends: until then nobody else is admitted beside a launch that sizes itself.

    Raises:
        DeviceOutOfMemory: the bytes belong to somebody else by now, and the engine has to go.
    """
    for account, nbytes in taken.items():
        promised = grants[account].static_bytes + costs.context
        over = nbytes - promised
        if over <= 0:
            continue
        booked = grow(account, over)
        if over <= _UNSURE:
            continue
        what = (
            f"the engine of model {name!r} took {format_bytes(nbytes)} on {account} and was promised "
            f"{format_bytes(promised)}"
        )
        if not booked:
            raise DeviceOutOfMemory(what, account=account, needed=over)
        _log.warning("%s: the rest was free, and is booked too", what)
