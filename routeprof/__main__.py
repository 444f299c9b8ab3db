"""``python -m routeprof``."""

from routeprof.commands import main

main()
