"""Long copies that the worker queues in windows, and the ways over two hops."""
