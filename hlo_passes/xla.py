"""Every touch of a jax or jaxlib private module, in one place.

Seen working with jax 0.11.2 and 0.12.0.1. Each function says which private name it
needs; when one moves, this file is the only one to mend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlib import _hlo
from jaxlib._jax import mlir

POST_SCHEDULER = 1
"""jax.extend.xla.PipelineStage.POST_SCHEDULER.value (0.11.2, 0.12.0.1)."""

Hook = Callable[[bytes], bytes | None]


def hlo_text_to_proto(text: str) -> bytes:
    """Parses HLO text with XLA's own parser into a serialized ``HloModuleProto``.

    Raises whatever XLA's parser raises. Needs ``jaxlib._hlo.hlo_module_from_text``.
    """
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def hlo_proto_to_text(proto: bytes) -> str:
    """Prints a serialized ``HloModuleProto`` as XLA prints it."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()


def hlo_proto_to_canonical_text(proto: bytes) -> str:
    """Prints a serialized ``HloModuleProto`` with all that XLA prints of it."""
    options = _hlo.HloPrintOptions()
    options.print_metadata = True
    options.print_backend_config = True
    options.print_large_constants = True
    options.print_control_dependencies = True
    return _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string(options)


def stablehlo_to_proto(module: Any) -> bytes:
    """Converts StableHLO (MLIR text, bytecode or module) to a serialized HLO module.

    Needs ``jaxlib._jax.mlir.mlir_module_to_xla_computation``.
    """
    source = module if isinstance(module, str | bytes) else str(module)
    computation = mlir.mlir_module_to_xla_computation(source)
    return computation.as_serialized_hlo_module_proto()

