"""What it costs the calling thread to submit a copy and to wait for its layers."""
