"""Pure privacy mathematics: floats, arrays, frozen dataclasses. No I/O, no torch, no Prefect."""
