"""A solver that answers with something that is no message."""

import sys

sys.stdin.buffer.read(1)
sys.stdout.buffer.write(b"this is not a frame" * 10)
sys.stdout.buffer.flush()
