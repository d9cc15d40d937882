"""Define ``torch.simulated``, the module that torch expects for a device."""

from __future__ import annotations

import contextlib
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from tests.accelerator_rules import NAME
from tests.accelerator_rules.build import compiled

__all__ = ["Event", "Stream", "device_module"]


class Stream(torch.Stream):
    """Order operations of the device, as ``torch.cuda.Stream`` does.

    Its methods are in Python, so that tests can replace them.
    """

    def __new__(cls, device: Any = None, priority: int = 0, **known: int) -> Stream:
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device(NAME, 0), priority=priority)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let this stream wait for all operations of ``stream`` so far."""
        super().wait_stream(stream)

    def wait_event(self, event: torch.Event) -> None:
        """Let this stream wait for ``event``."""
        super().wait_event(event)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event in this stream, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all operations of this stream so far."""
        super().synchronize()


class Event(torch.Event):
    """Mark a place in a stream, as ``torch.cuda.Event`` does."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, torch.device(NAME, 0), enable_timing=True)

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark the current place in ``stream``, or in the current stream."""
        self.seconds = perf_counter()
        super().record(_current_stream() if stream is None else stream)

    def elapsed_time(self, end: Event) -> float:  # type: ignore[override]
        """Return the milliseconds up to ``end``; that of ``torch.Event`` does not accept a subclass."""
        return 1000 * (end.seconds - self.seconds)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let ``stream``, or the current stream, wait for the event."""
        (_current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        super().synchronize()


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _current_stream(device: Any = None) -> Stream:
    return _as_stream(torch.accelerator.current_stream())


@contextlib.contextmanager
def _use_stream(stream: torch.Stream | None) -> Any:
    if stream is None:
        yield
        return
    before = _current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def device_module() -> ModuleType:
    """Return the module, which :func:`torch._register_device_module` is given."""
    extension = compiled()
    generator: torch.Generator = extension.generator()
    module: Any = ModuleType(f"torch.{NAME}")
    module.Stream, module.Event = Stream, Event
    module.current_stream = _current_stream
    module.default_stream = lambda device=None: Stream(stream_id=0, device_index=0, device_type=20)
    module.stream = _use_stream
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.is_available = module.is_initialized = module._is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.init = module.empty_cache = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._exchange_device = module._maybe_exchange_device = lambda index: 0
    module.device = lambda index: contextlib.nullcontext()
    module.get_device_name = lambda device=None: NAME
    # Random numbers
    module.default_generators = (generator,)
    module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(seed)
    module.initial_seed = generator.initial_seed
    module.seed = module.seed_all = generator.seed
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_rng_state_all = lambda: [generator.get_state()]
    module.set_rng_state_all = lambda states: generator.set_state(states[0])
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    module.is_bf16_supported = lambda including_emulation=True: True
    # Memory
    module.memory_allocated = module.memory_reserved = lambda device=None: extension.memory()[0]
    module.max_memory_allocated = module.max_memory_reserved = lambda device=None: extension.memory()[1]
    module.reset_peak_memory_stats = module.reset_max_memory_allocated = lambda device=None: extension.reset_peak()
    module.mem_get_info = lambda device=None: _free_and_total(extension.memory())
    module.set_total_memory = extension.set_total
    module.memory_stats = lambda device=None: {
        "allocated_bytes.all.current": extension.memory()[0],
        "allocated_bytes.all.peak": extension.memory()[1],
        "num_alloc_retries": 0,
    }
    return module


def _free_and_total(memory: tuple[int, int, int]) -> tuple[int, int]:
    allocated, _, total = memory
    return total - allocated, total
