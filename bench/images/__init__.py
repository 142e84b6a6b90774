"""What images in an arena cost: whole conversations, those that grew, and turns."""
