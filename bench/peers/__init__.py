"""How fast copies between two devices are, and copies of a state that lies on both."""
