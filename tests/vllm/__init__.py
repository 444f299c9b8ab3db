"""The vLLM plugin in real engines on the CPU; see ``environment.sh`` for what they run in."""
