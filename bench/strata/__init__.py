"""The engine loop of examples/ at the lengths that an engine's users reported."""
