"""Fuses the split projections of a Hugging Face checkpoint offline, and proves that nothing changed."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "FusecheckError",
    "SystemFailure",
    "UsageError",
    "bench",
    "finalize",
    "fuse",
    "inspect",
    "load_model",
    "make_plan",
    "packed_modules_mapping",
    "run_part",
    "unfuse",
    "verify",
    "verify_layers",
]

if TYPE_CHECKING:
    from fusecheck.engines.nano_vllm import load_model
    from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
    from fusecheck.mapping import packed_modules_mapping
    from fusecheck.operations.bench import bench
    from fusecheck.operations.finalize import finalize
    from fusecheck.operations.fuse import fuse
    from fusecheck.operations.inspect import inspect
    from fusecheck.operations.plan import make_plan
    from fusecheck.operations.run import run_part
    from fusecheck.operations.unfuse import unfuse
    from fusecheck.operations.verify import verify
    from fusecheck.operations.verify_layers import verify_layers
else:
    _PLACES = {
        "load_model": "fusecheck.engines.nano_vllm",
        "packed_modules_mapping": "fusecheck.mapping",
        **{
            verb: f"fusecheck.operations.{verb}"
            for verb in ("bench", "finalize", "fuse", "inspect", "unfuse", "verify", "verify_layers")
        },
        **dict.fromkeys(("CheckpointError", "FusecheckError", "SystemFailure", "UsageError"), "fusecheck.errors"),
        "make_plan": "fusecheck.operations.plan",  # `fusecheck.plan` is the module that plans one output
        "run_part": "fusecheck.operations.run",
    }

    def __getattr__(name: str) -> object:
        """Public names, imported when first used: some need torch, and a copy of files must not pay for that."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=__name__)
        return getattr(import_module(_PLACES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
