"""A solver that reports once and then never ends."""

import json
import sys
import time

from autoshard_server.solvers.messages import FrameKind, read_frame, write_frame

read_frame(sys.stdin.buffer)
progress = {"phase": "branching", "incumbent": 2.0, "bound": 1.0, "gap": 0.5}
write_frame(sys.stdout.buffer, FrameKind.PROGRESS, json.dumps(progress).encode())
time.sleep(3600)
