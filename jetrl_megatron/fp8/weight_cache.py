"""The once-per-step weight cache: BF16 parameters become FP8 bytes here and nowhere else.

Enters: BF16 model parameters after an optimizer step (never the FP32 masters). Leaves: `QuantizedWeight` for the actor's GEMMs; the same
bytes go to the rollout engines.
Invariants: every registered parameter is quantised once a refresh, into buffers whose addresses never change (CUDA graphs and peers
may hold them); `w_t` is the byte transpose of `w`; a parameter that changed since the last refresh is never served.
What can be seen of a change: in-place operations on the parameter, and a new storage. Writes through `.data` or a view of a shared
buffer do not count up torch's version, so whoever steps an optimizer that writes so calls `invalidate()`.
Left out: names and layouts of checkpoints (conversion/), transport (sync/).

Legend: N output features, K input features.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from jetrl_megatron.config import Backend, ScaleFormat
from jetrl_megatron.fp8.backend import kernels_of
from jetrl_megatron.fp8.block_scaled import BlockScaled


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """One weight in FP8, as fprop and dgrad read it."""

    w: BlockScaled
    """[N, K] in blocks 128x128, rows in cache order."""
    w_t: BlockScaled | None = None
    """[K, N] in blocks 128x128: the bytes of `w` transposed; None where dgrad runs in BF16 or nothing runs backward."""


@dataclass(kw_only=True, eq=False)
class _Entry:
    param: torch.Tensor
    row_order: torch.Tensor | None
    cached: QuantizedWeight | None = None
    seen: tuple[int, int] | None = None

    def fingerprint(self) -> tuple[int, int]:
        """What torch counts of in-place changes, and where the parameter lives."""
        return self.param._version, self.param.data_ptr()


class WeightCache:
    """FP8 copies of registered parameters, refreshed once per optimizer step.

    scale_format: FP32 scales or powers of two. backend: resolved; who quantises. keep_transposed: whether dgrad needs `w_t`.
    """

    def __init__(
        self, scale_format: ScaleFormat = ScaleFormat.fp32, *, backend: Backend = Backend.reference, keep_transposed: bool = True
    ) -> None:
        """Start empty at version 0."""
        self.scale_format = scale_format
        self.keep_transposed = keep_transposed
        self.version = 0
        self._kernels = kernels_of(backend)
        self._entries: dict[str, _Entry] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted: the order of `digest`."""
        return tuple(sorted(self._entries))

    def register(self, name: str, param: torch.Tensor, row_order: torch.Tensor | None = None) -> None:
        """Add a weight; it is quantised at the next refresh.

        name: unique. param: [N, K] bfloat16. row_order: [N] int64, cache row i is parameter row row_order[i]; None keeps it.
        Raises ValueError on a name used twice, another dtype or rank, or an order that is no permutation.
        """
        if name in self._entries:
            raise ValueError(f"weight {name!r} is registered twice; names must be unique")
        if param.dim() != 2 or param.dtype is not torch.bfloat16:
            raise ValueError(
                f"weight {name!r} is {param.dtype} {tuple(param.shape)}; the cache quantises 2-D bfloat16 parameters, not FP32 masters"
            )
        if row_order is not None:
            expected = torch.arange(param.shape[0], device=row_order.device)
            if row_order.shape != expected.shape or not torch.equal(row_order.sort().values, expected):
                raise ValueError(f"row_order of {name!r} is not a permutation of its {param.shape[0]} rows")
            row_order = row_order.to(param.device)
        self._entries[name] = _Entry(param=param, row_order=row_order)

    @torch.no_grad()
    def refresh(self) -> int:
        """Quantise every registered parameter once, into the same buffers as before; returns the new version."""
        for entry in self._entries.values():
            source = entry.param if entry.row_order is None else entry.param.index_select(0, entry.row_order)
            before = None if entry.cached is None else (entry.cached.w, entry.cached.w_t)
            entry.cached = QuantizedWeight(
                *self._kernels.quantize_weight(
                    source.detach(), scale_format=self.scale_format, with_transpose=self.keep_transposed, out=before
                )
            )
            entry.seen = entry.fingerprint()
        self.version += 1
        return self.version

    def invalidate(self) -> None:
        """Declare all copies stale, after writes that torch does not count; `get` raises until the next refresh."""
        for entry in self._entries.values():
            entry.seen = None

    def get(self, name: str) -> QuantizedWeight:
        """The bytes of a weight.

        Raises KeyError for an unknown name, RuntimeError that names the parameter where it changed since the last refresh.
        """
        entry = self._entries[name]
        if entry.cached is None or entry.seen != entry.fingerprint():
            state = "was never quantised" if entry.cached is None else "was modified after the last refresh"
            raise RuntimeError(f"weight {name!r} {state} (cache version {self.version}); call refresh() after the optimizer step")
        return entry.cached

    def row_order(self, name: str) -> torch.Tensor | None:
        """The permutation that `name` was registered with."""
        return self._entries[name].row_order

    def digest(self) -> str:
        """SHA-256 in hex over all codes and scales, in name order; raises as `get` does where bytes are stale."""
        return digest_of(self.get(name).w for name in self.names)


def digest_of(weights: Iterable[BlockScaled]) -> str:
    """SHA-256 in hex over codes then scales of each weight in turn, both row-major, scales as little-endian FP32."""
    sha = hashlib.sha256()
    for w in weights:
        sha.update(w.data.view(torch.uint8).contiguous().cpu().numpy().tobytes())
        sha.update(w.scale.contiguous().cpu().numpy().tobytes())
    return sha.hexdigest()
