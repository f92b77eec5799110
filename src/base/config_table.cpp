// The one table of settings. Add a row, in alphabetical order, and it can be set by file,
// environment and code, and `crossdock info --config` shows it. Help is one sentence.
// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "base/config.hpp"

namespace crossdock::base {
namespace {

using enum SettingType;

// clang-format off
constexpr std::array kSettings = {
    Setting{"control.connect_timeout", kDuration, "5s", "1ms..10min",
            "How long opening a connection to a peer or store may take."},
    Setting{"control.handshake_timeout", kDuration, "3s", "1ms..10min",
            "How long a connected peer may take to finish the handshake before it is dropped."},
    Setting{"control.listen", kString, "127.0.0.1:0", "",
            "Address that an engine listens on for peers; port 0 picks a free one."},
    Setting{"control.mailbox_bytes", kSize, "64MiB", "64KiB..1TiB",
            "Bytes a mailbox holds before senders are told to wait; all that nobody asked for share as much."},
    Setting{"control.mailbox_messages", kInt, "65536", "1..16777216",
            "Messages a mailbox holds before senders are told to wait."},
    Setting{"control.max_handshakes", kInt, "256", "1..65536",
            "Connections that may be in the handshake at a time; the oldest gives way."},
    Setting{"control.renew", kDuration, "5s", "100ms..1h",
            "How often the entry in the metadata store is renewed; its lease is three times that."},
    Setting{"control.secret", kString, "", "",
            "Key shared by all peers of a cluster; when set, peers without it are refused.", "", true},
    Setting{"cuda.driver", kString, "", "",
            "CUDA driver library to open; empty searches libcuda.so.1 in the usual places."},
    Setting{"jit.cache_bytes", kSize, "1GiB", "0B..1TiB",
            "Size to which the cache of compiled kernels is pruned; 0 never prunes."},
    Setting{"jit.cache_dir", kString, "", "",
            "Folder of compiled kernels; empty is crossdock in the user's cache folder, `none` is no cache."},
    Setting{"jit.nvcc", kString, "", "",
            "Path of nvcc, used when there is no NVRTC; empty searches, `none` forbids it."},
    Setting{"jit.nvrtc", kString, "", "",
            "NVRTC library that compiles kernels; empty searches, `none` forbids it."},
    Setting{"jit.threads", kInt, "0", "0..64",
            "Kernels compiled side by side; 0 is one a CPU, at most 8."},
    Setting{"log.level", kString, "info", "",
            "Level, or levels by component: `warn,transport.tcp=debug`.", "CROSSDOCK_LOG"},
    Setting{"trace.events_per_thread", kInt, "65536", "64..16777216",
            "Newest trace events kept for each thread; older ones are dropped."},
    Setting{"trace.file", kString, "", "",
            "File for a Chrome/Perfetto trace, `%p` is replaced by the process id; empty is off.", "CROSSDOCK_TRACE"},
    Setting{"transfer.checksum", kBool, "false", "",
            "Check each transfer end to end with XXH3."},
    Setting{"transfer.fallback", kBool, "false", "",
            "Let a transfer use a slower transport when the best one fails."},
    Setting{"transfer.max_pending", kInt, "65536", "1..16777216",
            "Transfers in flight before submit() answers kWouldBlock."},
    Setting{"transfer.max_retries", kInt, "2", "0..100",
            "How often a failed slice is tried again, on another rail where there is one."},
    Setting{"transfer.merge", kBool, "true", "",
            "Merge adjacent requests of a batch into larger slices."},
    Setting{"transfer.quiesce_grace", kDuration, "100ms", "0..1min",
            "Time between asking a late transfer to stop and cutting its connections."},
    Setting{"transfer.shard_bytes", kSize, "4MiB", "4KiB..4GiB",
            "What one rail gets of a transfer at a time."},
    Setting{"transfer.slice_bytes", kSize, "64KiB", "4KiB..1GiB",
            "Largest piece of a request that one rail moves at a time."},
    Setting{"transfer.timeout", kDuration, "30s", "1ms..24h",
            "Deadline of a transfer that was submitted without one."},
    Setting{"transport.enabled", kString, "auto", "",
            "Transports an engine may use, as in `shm,tcp`; `auto` is all that work here."},
    Setting{"transport.faulty.corrupt_ppm", kInt, "0", "0..1000000",
            "Fault injector (`faulty+tcp`): shards of a million in which one bit is flipped."},
    Setting{"transport.faulty.delay_max", kDuration, "0s", "0..1min",
            "Fault injector: each shard starts up to this much later."},
    Setting{"transport.faulty.drop_ppm", kInt, "0", "0..1000000",
            "Fault injector: shards of a million that lose the connection."},
    Setting{"transport.faulty.duplicate_ppm", kInt, "0", "0..1000000",
            "Fault injector: shards of a million whose success is reported twice."},
    Setting{"transport.faulty.fail_ppm", kInt, "0", "0..1000000",
            "Fault injector: shards of a million that fail half-way."},
    Setting{"transport.faulty.reorder", kInt, "0", "0..1024",
            "Fault injector: finished shards held back and reported in another order."},
    Setting{"transport.faulty.seed", kInt, "1", "0..4294967295",
            "Fault injector: the faults are the same for the same seed and order of shards."},
    Setting{"transport.loopback.threads", kInt, "1", "1..64",
            "Threads that copy for the loopback transport."},
    Setting{"transport.shm.copy", kEnum, "auto", "auto|map|vm",
            "How shm moves bytes: copies into a shared mapping, process_vm calls, or the faster that is possible."},
    Setting{"transport.shm.inline_bytes", kSize, "64KiB", "0..16MiB",
            "Shards up to this size are copied by the submitting thread (loopback and shm)."},
    Setting{"transport.shm.spin", kDuration, "20us", "0..10ms",
            "How long a copying thread polls for more work before it sleeps (loopback and shm)."},
    Setting{"transport.shm.threads", kInt, "1", "1..64",
            "Threads that copy for the shm transport."},
    Setting{"transport.tcp.frame_bytes", kSize, "1MiB", "4KiB..16MiB",
            "Payload of one tcp frame: what the peer acknowledges at a time, and what a cancel waits for."},
    Setting{"transport.tcp.inline_bytes", kSize, "32KiB", "0..1MiB",
            "A lone shard up to this size is sent by the submitting thread itself."},
    Setting{"transport.tcp.lanes", kInt, "2", "1..64",
            "Connections that the tcp transport opens to each peer."},
    Setting{"transport.tcp.queue_shards", kInt, "8192", "16..1048576",
            "Shards that may wait on one connection before a submission is told to try later."},
    Setting{"transport.tcp.socket_buffer", kSize, "0", "0..1GiB",
            "Send and receive buffer of each tcp connection; 0 leaves both to the kernel."},
    Setting{"transport.tcp.spin", kDuration, "0s", "0..10ms",
            "How long a tcp thread polls for the answer to a small request before it sleeps."},
    Setting{"transport.tcp.threads", kInt, "2", "1..64",
            "Threads that run the connections of the tcp transport."},
    Setting{"transport.tcp.window_bytes", kSize, "16MiB", "64KiB..1GiB",
            "Bytes on one tcp connection that may be unacknowledged."},
};
// clang-format on

}  // namespace

std::span<const Setting> settings() noexcept {
  return kSettings;
}

}  // namespace crossdock::base
