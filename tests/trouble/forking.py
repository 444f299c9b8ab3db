"""A process that forks while it records, as data loaders and launchers do.

``python -m tests.trouble.forking DIRECTORY`` prints a JSON line of what was served by the parent.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from tests.trouble.engine import Engine

FORKS = 10


def in_the_child(engine: Engine) -> None:
    """All that a user's program may do with a recording; none of it is to be seen."""
    with engine.recorder.tag("child"):
        engine.serve(3)
    engine.recorder.switch(False)
    engine.recorder.switch(True)
    engine.serve(3)
    engine.recorder.close()


def main(directory: Path) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
    engine, children = Engine(directory, window=0.05), []
    for _ in range(FORKS):
        engine.serve(20)  # the drain thread holds whichever lock it holds
        child = os.fork()
        if not child:
            in_the_child(engine)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with engine.recorder.tag("parent"):
        engine.serve()
    print(json.dumps(engine.said(codes=codes, pid=os.getpid())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
