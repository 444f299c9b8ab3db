"""Two recordings held against each other: what changed, and whether it is more than chance."""
