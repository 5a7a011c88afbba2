"""``sglang-generation`` and ``sglang-embedding``. SGLang itself runs elsewhere: in processes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from sie_core import (
    Adapter,
    AdmissionReserve,
    Capabilities,
    DeviceView,
    Engine,
    EngineEvents,
    LoadError,
    ModelSpec,
    TransitionContext,
)

from sie_adapters_sglang._about import capabilities_of
from sie_adapters_sglang._argv import check_options
from sie_adapters_sglang._flags import flags_for
from sie_adapters_sglang._installed import find_installed
from sie_adapters_sglang._options import (
    EmbeddingOptions,
    EngineOptions,
    GenerationOptions,
    HiCacheOptions,
    options_of,
)
from sie_adapters_sglang._plan import Plan, model_files, plan_for, read_config

if TYPE_CHECKING:
    from sie_adapters_sglang._engine import SglangEngine

__all__ = [
    "EmbeddingAdapter",
    "EmbeddingOptions",
    "GenerationAdapter",
    "GenerationOptions",
    "HiCacheAdapter",
    "HiCacheOptions",
    "SglangAdapter",
]


class SglangAdapter(Adapter):
    """What the adapters of this package share."""

    options: ClassVar[type] = EngineOptions

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_sglang._launch import start
        from sie_adapters_sglang._sizing import claim_overrun
        from sie_adapters_sglang._state import end_orphans

        end_orphans()  # a server may have died since this one asked for room
        plan = plan_for(model, self._options(model), "all", ctx)
        grants = ctx.grant.devices
        costs = plan.costs_on(grants)  # before this launch shows others
        running = start(model, plan, ctx)
        try:
            engine = self._engine()(plan, running, list(grants), self._capabilities(plan), events)
        except BaseException:
            running.abandon()
            raise
        try:
            claim_overrun(model.name, costs, grants, engine.taken(costs), events.request_growth)
            engine.emulated.take(ctx)
        except BaseException:
            engine.close(ctx)
            raise
        return engine

    def describe(self, model: ModelSpec) -> Capabilities | None:
        """Raises LoadError: what a start would fail with, as far as that shows beforehand."""
        options = self._options(model)
        installed = find_installed(options.python, options.env)
        check_options(options, flags_for(installed.sglang))
        try:
            files = model_files(model, installed, options.env, "cached")
        except LoadError:
            if model.source is None or model.source.kind != "hf":
                raise
            return None  # it is fetched when it is loaded
        return capabilities_of(read_config(files.folder), options)

    def reserve(self, model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve:
        """What a load will take. Raises LoadError.

        Engines that a dead server left behind are ended first: what they hold would count as somebody else's, and the
        model might never get room.
        """
        from sie_adapters_sglang._state import end_orphans

        end_orphans()
        return plan_for(model, self._options(model)).reserve(devices)

    def _options(self, model: ModelSpec) -> EngineOptions:
        kind: type[EngineOptions] = self.options
        return options_of(model, kind)

    def _capabilities(self, plan: Plan) -> Capabilities:
        return capabilities_of(plan.config, plan.options)

    def _engine(self) -> type[SglangEngine]:
        raise NotImplementedError


class GenerationAdapter(SglangAdapter):
    """Chat and completions."""

    options: ClassVar[type] = GenerationOptions

    def _engine(self) -> type[SglangEngine]:
        from sie_adapters_sglang._engine import GenerationEngine

        return GenerationEngine


class HiCacheAdapter(GenerationAdapter):
    """Generation with a second KV cache in host memory, booked in the ledger beside the host tier."""

    options: ClassVar[type] = HiCacheOptions


class EmbeddingAdapter(SglangAdapter):
    """One vector a text."""

    options: ClassVar[type] = EmbeddingOptions

    def _engine(self) -> type[SglangEngine]:
        from sie_adapters_sglang._embedding import EmbeddingEngine

        return EmbeddingEngine
