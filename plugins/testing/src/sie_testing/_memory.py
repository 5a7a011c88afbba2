"""What a fake engine holds: made-up figures, or real bytes of an emulated device that are really copied."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, field
from sie_core import DeviceBuffer, TransitionContext

if TYPE_CHECKING:
    from sie_testing.fake import FakeOptions

__all__ = ["FakeMemory"]


@define
class FakeMemory:
    """The bytes of one fake engine, by account. ``context`` stays through a park, ``weights`` do not."""

    options: FakeOptions
    accounts: tuple[str, ...]
    weights: dict[str, int]
    context: dict[str, int]
    digest: bytes = b""
    sample: bytes = b""
    parked: bool = False
    backup_bytes: int = 0
    damaged: bool = False
    loras: dict[str, int] = field(factory=dict)
    """Bytes of each LoRA adapter on every account."""
    _buffers: dict[tuple[str, str], DeviceBuffer] = field(factory=dict)
    _copy: dict[str, memoryview] = field(factory=dict)
    _freed: bool = False

    @classmethod
    def take(cls, options: FakeOptions, ctx: TransitionContext, accounts: Sequence[str], name: str) -> FakeMemory:
        """Take the memory of a new engine. Raises DeviceOutOfMemory, having given back what it took."""
        factor = 1.0 if options.realised is None else options.realised
        weights: dict[str, int] = {}
        context: dict[str, int] = {}
        for account in accounts:
            # Engines of a pool live in one process: its context is the pool's, not theirs.
            context[account] = 0 if options.pool is not None else int(options.context_bytes * factor)
            grant = ctx.grant.devices.get(account)
            granted = grant.static_bytes - options.context_bytes if grant is not None else options.weights_bytes
            size = max(options.weights_bytes, min(options.want_bytes, granted))
            weights[account] = int(size * factor)
        memory = cls(options, tuple(accounts), weights, context)
        if options.allocate:
            memory._allocate(ctx, "context", context)
            memory._allocate(ctx, "weights", weights)
            for rank, account in enumerate(accounts):
                _fill(memory._buffers["weights", account].view, f"{name}:{rank}")
            memory.digest, memory.sample = memory._digest(), memory._sample()
        return memory

    @property
    def copy_bytes(self) -> int:
        """Bytes of the host copy."""
        own = self.options.offload_bytes
        own = None if self.options.allocate else own
        return (sum(self.weights.values()) if own is None else own) + self._lora_bytes * len(self.accounts)

    @property
    def _lora_bytes(self) -> int:
        return sum(self.loras.values())

    def report(self) -> dict[str, int | None]:
        """Bytes held by account; ``None`` where nobody can tell."""
        if self._freed:
            return dict.fromkeys(self.accounts, 0)
        if self.options.realised is None:
            return dict.fromkeys(self.accounts, None)
        return {account: self.context[account] + self._weights_on(account) for account in self.accounts}

    def really_holds(self, account: str) -> int:
        """Allocated bytes there."""
        return sum(len(buffer.view) for (_, where), buffer in self._buffers.items() if where == account)

    def retained(self) -> dict[str, int]:
        """What a parked engine says it keeps: the contexts (its lie about freed bytes is not in here)."""
        return {account: nbytes for account, nbytes in self.context.items() if nbytes}

    def park(self, ctx: TransitionContext) -> None:
        """Copy the weights out and free them. With a kept backup nothing is copied. Raises HostOutOfMemory."""
        if self.parked:
            return
        if self.options.allocate:
            if not self._copy:
                self._copy_out(ctx)
            for key in [key for key in self._buffers if key[0] != "context"]:
                self._buffers.pop(key).free()
        self.backup_bytes = 0
        self.parked = True
        if self.options.allocate:
            kept = {account: self._weights_on(account) for account in self.accounts}
            self._allocate(ctx, "kept", kept)

    def wake(self, ctx: TransitionContext) -> None:
        """Copy the weights back. The copy stays whole when this raises DeviceOutOfMemory."""
        if not self.parked:
            return
        if self.options.allocate:
            for account in self.accounts:
                kept = self._buffers.pop(("kept", account), None)
                if kept is not None:
                    kept.free()
            wanted = {"weights": self.weights}
            wanted |= {f"lora {name}": dict.fromkeys(self.accounts, nbytes) for name, nbytes in self.loras.items()}
            self._allocate_all(ctx, wanted)
            for account, copy in self._copy.items():
                self._buffers["weights", account].view[: len(copy)] = copy
        if self.options.corrupt_restore:
            self.corrupt()
        self.parked = False
        self.backup_bytes = self.copy_bytes if self.options.backup else 0
        if not self.options.backup:
            self._copy.clear()

    def damage(self) -> str:
        """Empty while the weights are what they were when loaded."""
        return "damaged" if self.damaged else ""

    def look(self) -> None:
        """See whether the weights are what they were when loaded; a sample of them, or a wake would be all hashing."""
        if self.options.allocate and self._sample() != self.sample:
            self.damaged = True

    def drop_backup(self) -> int:
        """Drop the copy that survived a wake. Returns the bytes freed."""
        dropped, self.backup_bytes = self.backup_bytes, 0
        if dropped:
            self._copy.clear()
        return dropped

    def free(self) -> None:
        """Give everything back. Idempotent."""
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
        self._copy.clear()
        self.loras.clear()
        self.backup_bytes = 0
        self._freed = True

    def _weights_on(self, account: str) -> int:
        kept = 1.0 - self.options.freed if self.parked else 1.0
        return int((self.weights[account] + self._lora_bytes) * kept)

    def add_lora(self, ctx: TransitionContext, name: str, nbytes: int) -> None:
        """Take the memory of a LoRA adapter. Raises DeviceOutOfMemory, having given back what it took."""
        if self.options.allocate:
            self._allocate_all(ctx, {f"lora {name}": dict.fromkeys(self.accounts, nbytes)})
        self.loras[name] = nbytes

    def remove_lora(self, name: str) -> None:
        """Give it back. Idempotent."""
        self.loras.pop(name, None)
        for account in self.accounts:
            buffer = self._buffers.pop((f"lora {name}", account), None)
            if buffer is not None:
                buffer.free()

    def _allocate(self, ctx: TransitionContext, kind: str, sizes: dict[str, int]) -> None:
        """Take the memory of an engine that is being made, or is parked; all goes back when it can't be had."""
        try:
            self._allocate_all(ctx, {kind: sizes})
        except BaseException:
            for key in [] if self.parked else list(self._buffers):
                self._buffers.pop(key).free()
            raise

    def _allocate_all(self, ctx: TransitionContext, kinds: dict[str, dict[str, int]]) -> None:
        taken: list[tuple[str, str]] = []
        try:
            for kind, sizes in kinds.items():
                for account, nbytes in sizes.items():
                    if nbytes:
                        self._buffers[kind, account] = ctx.device_buffer(account, nbytes)
                        taken.append((kind, account))
        except BaseException:
            for key in taken:
                self._buffers.pop(key).free()
            raise

    def _copy_out(self, ctx: TransitionContext) -> None:
        copies: dict[str, memoryview] = {}
        for account in self.accounts:
            view = self._buffers["weights", account].view
            copy = ctx.host_buffer(len(view))
            copy[: len(view)] = view
            copies[account] = copy
        self._copy = copies

    def corrupt(self) -> None:
        """Change the weights."""
        if self.options.allocate:
            view = self._buffers["weights", self.accounts[0]].view
            view[0] = view[0] ^ 0xFF
            self.damaged = self._digest() != self.digest
        else:
            self.damaged = True

    def _sample(self) -> bytes:
        views = [self._buffers["weights", account].view for account in self.accounts]
        return b"".join(bytes(view[:: max(1, len(view) // 256)]) for view in views)

    def _digest(self) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for account in self.accounts:
            total.update(self._buffers["weights", account].view)
        return total.digest()


def _fill(view: memoryview, seed: str) -> None:
    """Fill with bytes that only this seed gives, a block at a time."""
    block = hashlib.shake_128(seed.encode()).digest(64 * 1024)
    for start in range(0, len(view), len(block)):
        piece = block[: len(view) - start]
        view[start : start + len(piece)] = piece
