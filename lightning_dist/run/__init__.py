"""Hold what a run needs besides its steps: the watchdog, telemetry, samplers, parity and pretrained weights."""
