"""Following recordings: what is there, what is new, and sums that can be narrowed to a time."""
