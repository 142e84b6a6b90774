"""What the benchmarks share: sessions, ceilings, the machine, results."""
