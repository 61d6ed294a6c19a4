"""A solver that does not listen to SIGTERM."""

import signal
import sys
import time

from autoshard_server.solvers.messages import FrameKind, read_frame, write_frame

signal.signal(signal.SIGTERM, signal.SIG_IGN)
read_frame(sys.stdin.buffer)
write_frame(sys.stdout.buffer, FrameKind.PROGRESS, b'{"phase": "deaf"}')
time.sleep(3600)
