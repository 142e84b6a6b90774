"""How fast copies are, against what the hardware gives, and how soon the first layer is ready."""
