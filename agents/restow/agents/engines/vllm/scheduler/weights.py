"""`Weights` follows what replaces an engine's weights, and says which revision they are of.

vLLM tells connectors nothing of that. All that may replace weights while an engine runs goes
through ``EngineCore.collective_rpc``: ``reload_weights``, what ``/update_weights`` calls, and
whatever an operator has the workers do. So its calls are watched, and each counts but those that
are known to replace nothing.

::

    known      a call may replace the weights -> unknown: nothing is handed over
    unknown    the call was reload_weights, or a version of them is told, and nothing that the
               weights before have computed is left in vLLM's cache -> known
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from restow.agents.engines.vllm.errors import EngineUnsupportedError
from restow.broker.logs import get_logger

HARMLESS = frozenset(
    {
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "profile",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
    }
)
"""What vLLM's own entry points have workers do that replaces nothing."""


class Weights:
    """Those of one engine. Belongs to the scheduler's thread, which also serves vLLM's calls."""

    def __init__(
        self,
        first: str,
        life: str,
        checkpoint: Callable[[str], str],
        cache_is_empty: Callable[[], bool],
    ) -> None:
        """Begin with the revision ``first``; empty: nobody knows which it is.

        ``life`` makes words that no other engine says. ``checkpoint`` returns a word for weights
        that were loaded from a path (empty: from where they were loaded first), or none.
        ``cache_is_empty`` says whether vLLM keeps nothing that it has computed.
        """
        self.known = True
        """Whether states may be handed over."""
        self.revision = first
        """Which states may be, or might last."""
        self.on_replaced: Callable[[str], None] = lambda _: None
        """Called when nothing is known any more, with a word that stands for just that."""
        self.on_known: Callable[[str], None] = lambda _: None
        """Called with the revision when it is known again."""
        self._first, self._life = first, life
        self._checkpoint, self._cache_is_empty = checkpoint, cache_is_empty
        self._path, self._word = "", first
        self._replaced = 0
        self._versions: set[str] = set()
        self._log = get_logger("restow.vllm")

    def watch(self, core: Any) -> None:
        """See what an engine core has its workers do."""
        call, set_version = core.collective_rpc, core.set_weight_version

        def collective_rpc(
            method: str | Callable[..., Any],
            timeout: float | None = None,
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if method in HARMLESS:
                return call(method, timeout, args, kwargs)
            self.lose(getattr(method, "__name__", str(method)))
            done = call(method, timeout, args, kwargs)
            if method == "reload_weights":
                self._reloaded(*args, **(kwargs or {}))
            elif method == "update_config":
                self._path = UNKNOWN_PATH
            return done

        def set_weight_version(weight_version: str) -> None:
            set_version(weight_version)
            self._versioned(weight_version)

        core.collective_rpc, core.set_weight_version = collective_rpc, set_weight_version

    def lose(self, why: str) -> None:
        """The weights may be others from now on."""
        self._replaced += 1
        self.known, self._word = False, ""
        self._log.warning("the weights may be replaced: nothing is handed over", by=why)
        self.on_replaced(f"unknown {self._life} {self._replaced}")

    def look(self) -> bool:
        """Return whether states may be handed over, which may have come to be since."""
        if not self.known and self._word and self._cache_is_empty():
            self.known, self.revision = True, self._word
            self._log.info("the weights are known: states are handed over", revision=self._word)
            self.on_known(self._word)
        return self.known

    def _reloaded(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        if weights_iterator is None and is_checkpoint_format:
            self._path = weights_path or self._path
            self._word = "" if self._path == UNKNOWN_PATH else self._checkpoint(self._path)
        self.look()

    def _versioned(self, version: str) -> None:
        """A version was told: it names weights that were replaced, and no others."""
        if not self._word and version not in self._versions:
            self._word = f"{self._first}@{version}"
        self._versions.add(version)
        self.look()


UNKNOWN_PATH = "\0"
"""Where weights would be loaded from after vLLM's config was changed at its workers."""


def core_of_caller() -> Any:
    """Return the engine core on whose behalf this is called, as vLLM's hooks are.

    Raises `EngineUnsupportedError` where none stands among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if hasattr(core, "collective_rpc") and hasattr(core, "set_weight_version"):
            return core
        frame = frame.f_back
    raise EngineUnsupportedError(
        "this version of vLLM does not show where its weights are replaced while it runs "
        "(EngineCore.collective_rpc, set_weight_version)"
    )
