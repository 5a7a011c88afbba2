"""For authors of engines made of torch tensors, who want more than being parked as they are.

Any such engine is parked by this package's plugin without knowing of it, and is copied out at every park. One that
inherits :class:`OffloadsTensors` keeps its host copy after a wake, so that its next park copies nothing. It calls
:func:`forget` in ``close``, and ``mark_stale`` after writing weights in a way that torch does not count.

What an engine may say for itself, as plain attributes: ``offload_roots``, objects (or a callable that returns them) to
look for tensors in beside its attributes; ``host_offload = False``, not to be parked.
"""

from __future__ import annotations

from sie_adapters_torch._offload import OffloadsTensors, drop_backup, forget, is_parked, mark_stale

__all__ = ["OffloadsTensors", "drop_backup", "forget", "is_parked", "mark_stale"]
