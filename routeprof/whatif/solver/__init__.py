"""How `place` searches: experts on GPUs, what may be exchanged, and which result to trust."""
