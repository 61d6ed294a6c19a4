"""A solver that does as its request tells it."""

import json
import signal
import subprocess
import sys
import time

from autoshard_server.solvers.messages import FrameKind, read_frame, write_frame


def spin() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


if sys.argv[1:] == ["spin"]:
    spin()
frame = read_frame(sys.stdin.buffer)
if frame is None:
    sys.exit(0)
told = json.loads(frame[1])
read_frame(sys.stdin.buffer)


def report(**progress: object) -> None:
    write_frame(sys.stdout.buffer, FrameKind.PROGRESS, json.dumps(progress).encode())


if told.get("spin"):
    child = subprocess.Popen([sys.executable, __file__, "spin"])  # noqa: S603  ourselves
    report(phase="spinning", child=child.pid)
    spin()
if told.get("fill"):
    report(phase="filling")
    filled = [b"\1" * (1 << 20) for _ in range(told["fill"])]
    time.sleep(3600)
for i in range(told.get("reports", 0)):
    report(phase=str(i))
    time.sleep(0.01)
time.sleep(told.get("seconds", 0))
write_frame(sys.stdout.buffer, FrameKind.RESULT, told["answer"].encode())
