"""Opens and reads files in children of a process that has little memory, and tells what came of it.

    python hostile.py FILE...

prints a JSON object by file: for "open" and "read" the error, or "ok", and the CPU seconds; and the
memory that the child took in MB.  Children are forked, so that they need not import anything.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from daskinfer.demo import demo_path
from daskinfer.source import open_raster

# Above what the imports take; of address space, which is more than is ever touched.
MOST_MB = 450


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def corner(scene):
    # In this thread: a child has not those of its parent.
    return scene[:, -1:, -1:].compute(scheduler="synchronous")


def attempt(action):
    start = time.process_time()
    try:
        result, text = action(), "ok"
    except BaseException as error:
        result, text = None, f"{type(error).__name__}: {error}"
    return result, [text, time.process_time() - start]


def child(path, pipe):
    limit = address_space() + (MOST_MB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scene, opened = attempt(lambda: open_raster(path))
    told = {"open": opened}
    if scene is not None and len(scene) <= 100:
        # Of its end: what was cut off is there.
        told["shape"] = scene.shape
        _, told["read"] = attempt(lambda: corner(scene))
    told["mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    os.write(pipe, json.dumps(told).encode())
    os._exit(0)


def main(paths):
    results = {}
    # What is imported or made on first use is not of any file.
    corner(open_raster(demo_path()))
    for path in paths:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(path, write)
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        _, status, _ = os.wait4(pid, 0)
        results[path] = json.loads(text) if text else {"died": status}
    print(json.dumps(results))


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    main(sys.argv[1:])
