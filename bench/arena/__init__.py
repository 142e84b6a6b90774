"""What pinned memory costs, and whom it holds up."""
