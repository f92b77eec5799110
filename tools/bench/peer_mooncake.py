#!/usr/bin/env python3
"""Runs the paged and large-block writes of `crossdock bench transfer` with Mooncake's transfer engine.

One process is the target, the other writes to it over TCP, like our own bench. Called by the bench with
an interpreter that has the published wheel, anew for each case: a refused batch may still be running;
it measures one case and prints it:
{"gb_per_s": median, "cpu_s_per_gb": median} or {"error": ...}.
SPDX-License-Identifier: Apache-2.0
"""
import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import statistics
import subprocess
import sys
import time


def make_engine():
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("initialize() failed")
    return engine


def make_memory(engine, size):
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 0x5A, size)
    if engine.register_memory(address, size) != 0:
        raise RuntimeError("register_memory() failed")
    return memory, address


def run_target(size):
    engine = make_engine()
    memory, address = make_memory(engine, size)
    print(f"127.0.0.1:{engine.get_rpc_port()} {address}", flush=True)
    sys.stdin.read()
    del memory


def cpu_seconds(child_pid):
    own = resource.getrusage(resource.RUSAGE_SELF)
    with open(f"/proc/{child_pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return own.ru_utime + own.ru_stime + (int(fields[11]) + int(fields[12])) / ticks


def move(engine, peer, source, target, lengths, batch):
    """0, or what the engine answered to the first batch that it refused."""
    for first in range(0, len(lengths), batch):
        part = slice(first, first + batch)
        code = engine.batch_transfer_sync_write(peer, source[part], target[part], lengths[part])
        if code != 0:
            return code
    return 0


def measure(engine, peer, local, remote, case, options, child_pid):
    block, count = case["block"], case["count"]
    batch = options.batch or count
    order = list(range(count))
    source = [local + i * block for i in random.Random(1).sample(order, count)]
    target = [remote + i * block for i in random.Random(2).sample(order, count)]
    lengths = [block] * count
    rates, cpu = [], []
    for i in range(options.repeat + 1):
        cpu_begin, begin = cpu_seconds(child_pid), time.monotonic()
        code = move(engine, peer, source, target, lengths, batch)
        elapsed = time.monotonic() - begin
        if code != 0:
            return {"error": f"batch_transfer_sync_write of {batch} blocks returned {code}"}
        if i > 0:
            rates.append(block * count / elapsed / 1e9)
            cpu.append((cpu_seconds(child_pid) - cpu_begin) / (block * count / 1e9))
    return {"gb_per_s": statistics.median(rates), "cpu_s_per_gb": statistics.median(cpu)}


def run_initiator(options):
    target = subprocess.Popen(
        [sys.executable, __file__, "--target", "--bytes", str(options.bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        # The engine logs to stdout as well; the line we want has two words, the second a number.
        for line in target.stdout:
            words = line.split()
            if len(words) == 2 and words[1].isdigit() and ":" in words[0]:
                break
        else:
            raise RuntimeError("the target process ended")
        peer, remote = words[0], int(words[1])
        engine = make_engine()
        memory, local = make_memory(engine, options.bytes)
        case = json.loads(options.case)
        result = measure(engine, peer, local, remote, case, options, target.pid)
        print("RESULT " + json.dumps(result), flush=True)
        del memory
    finally:
        target.kill()
        target.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--case", default="{}")
    parser.add_argument("--batch", type=int, default=0, help="blocks a call; 0: all in one")
    parser.add_argument("--target", action="store_true")
    options = parser.parse_args()
    if options.target:
        run_target(options.bytes)
    else:
        run_initiator(options)
    os._exit(0)  # the engine's threads do not always end by themselves


if __name__ == "__main__":
    main()
