"""Run a command and tell the peak memory of its whole process tree.

    python scripts/measure_memory.py daskinfer run large.tif cloud_unet.pt2 out.tif

Adds up the proportional set size (PSS, which shares pages among the processes that share them) of
the command and all its descendants, ten times a second.  Linux only.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import psutil


def tree_pss(root: psutil.Process) -> int:
    """Bytes of the process and its descendants."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # ended meanwhile
    return total


def main() -> int:
    child = subprocess.Popen(sys.argv[1:])
    root, peak, over = psutil.Process(child.pid), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.1):
            try:
                peak = max(peak, tree_pss(root))
            except psutil.Error:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = child.wait()
    over.set()
    watcher.join()
    print(f"peak memory of the process tree: {peak / 1e6:.0f} MB", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
