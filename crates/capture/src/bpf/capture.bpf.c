// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The capture programs. Two sources watch the byte streams between clients and one server and write them into ring buffers, each
 * event with its exact length and its position in its stream:
 *
 * - packets (packet.bpf.h): TCP segments at the cgroup hooks;
 * - calls (call.bpf.h): functions of the server, for what the network does not show: secure_read and secure_write of PostgreSQL
 *   (postgres.bpf.h), vio_read, vio_write and their like of MariaDB and MySQL (vio.bpf.h).
 *
 * No program waits, takes a lock of the server or wakes anybody: user space looks into the rings every few milliseconds. A full
 * ring loses the event, counts its bytes, and lets the server go on.
 */
#include "packet.bpf.h"
#include "postgres.bpf.h"
#include "vio.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";
