"""What a long copy of ours does to a small copy of somebody else."""
