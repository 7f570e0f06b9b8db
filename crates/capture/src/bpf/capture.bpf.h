/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What all capture programs need: settings, maps, accounts, and the copy of a variable number of bytes into a ring.
 */
#ifndef CAPTURE_BPF_H
#define CAPTURE_BPF_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <linux/ptrace.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "capture.h"

#define AF_UNIX 1
#define AF_INET 2
#define AF_INET6 10
#define TCP_SYN_RECV 3
#define TCP_FIN_WAIT1 4
#define TCP_FIN_WAIT2 5
#define TCP_CLOSE 7
#define TCP_LAST_ACK 9
#define TCP_LISTEN 10
#define TCP_CLOSING 11
#define SOCK_DONE 1 /* include/net/sock.h: set by tcp_fin() and by nobody else */

/* Flavours (the part behind ___) of kernel structures, with the fields that are read; CO-RE finds their places. */
#define KERNEL_STRUCT __attribute__((preserve_access_index))

struct ns_common___capture {
	unsigned int inum;
} KERNEL_STRUCT;

struct net___capture {
	struct ns_common___capture ns;
} KERNEL_STRUCT;

struct possible_net___capture {
	struct net___capture *net;
} KERNEL_STRUCT;

struct atomic64___capture {
	__s64 counter;
} KERNEL_STRUCT;

struct in6_addr___capture {
	struct {
		__u8 u6_addr8[16];
	} in6_u;
} KERNEL_STRUCT;

struct sock_common___capture {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	struct possible_net___capture skc_net;
	struct in6_addr___capture skc_v6_daddr;
	struct in6_addr___capture skc_v6_rcv_saddr;
	struct atomic64___capture skc_cookie;
	unsigned long skc_flags; /* bits of enum sock_flags */
} KERNEL_STRUCT;

struct sock___capture {
	struct sock_common___capture __sk_common;
	__u16 sk_protocol;
} KERNEL_STRUCT;

struct inet_sock___capture {
	__be16 inet_sport;
} KERNEL_STRUCT;

struct tcp_sock___capture {
	__u32 rcv_nxt;	      /* what we want next */
	__u32 snd_nxt;	      /* next sequence we send */
	__u32 write_seq;      /* behind what is queued to be sent */
	__u64 bytes_received; /* sum(delta(rcv_nxt)), data only */
} KERNEL_STRUCT;

struct file___capture {
	void *private_data;
} KERNEL_STRUCT;

struct socket___capture {
	struct file___capture *file;
	struct sock___capture *sk;
} KERNEL_STRUCT;

struct fdtable___capture {
	unsigned int max_fds;
	struct file___capture **fd;
} KERNEL_STRUCT;

struct files_struct___capture {
	struct fdtable___capture *fdt;
} KERNEL_STRUCT;

struct atomic___capture {
	int counter;
} KERNEL_STRUCT;

struct signal_struct___capture {
	struct atomic___capture live; /* threads that have not begun to exit */
} KERNEL_STRUCT;

struct task_struct___capture {
	int pid;
	int tgid;
	struct signal_struct___capture *signal;
	struct files_struct___capture *files;
	struct task_struct___capture *real_parent;
	__u64 start_boottime;
} KERNEL_STRUCT;

/* Settings, written between open and load. */
const volatile __u16 server_port = 0;	     /* host byte order; 0: no packets are wanted */
const volatile __u32 server_netns = 0;	     /* inode of the server's network namespace; 0: any */
const volatile __u8 server_mysql = 0;	     /* 1: MariaDB or MySQL, 0: PostgreSQL */
const volatile __u32 rings_mask = 0;	     /* number of rings, a power of two, minus 1 */
const volatile __u32 ring_payload_bytes = 0; /* of each ring, for events with payload; the rest is for the others */
#define RESPONSE_ALL 0xffffffffu
const volatile __u32 response_whole_bytes = RESPONSE_ALL; /* of one response, sent whole; then only tails. RESPONSE_ALL: no limit */
const volatile __u32 response_tail_bytes = 0; /* of each later segment or call */

/* Settings that change while running. */
struct control {
	__u32 postmaster; /* process that is probed (MariaDB, MySQL), or whose children are; 0: none */
	__u32 zero; /* always; the verifier does not know it */
	__u32 texts; /* how often the programs that tell texts were attached: what they remember of an earlier time is of no use */
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct control);
} control SEC(".maps");

struct ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16); /* inner template: user space makes the real ones */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, RINGS_MAX);
	__type(key, __u32);
	__array(values, struct ring);
} rings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS_NR);
	__type(key, __u32);
	__type(value, struct capture_counters);
} counters SEC(".maps");

/* Connections whose plain text only the probes see. User space may add some, the packet programs do. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct peer_key);
	__type(value, __u64); /* when it was noticed */
} encrypted SEC(".maps");

/* Keeps the types that user space reads from events in the object's BTF. */
const struct event_head *unused_event_head;
const volatile enum event_kind unused_event_kind = EVENT_PACKET;
const volatile enum event_direction unused_event_direction = DIRECTION_FRONTEND;

static __always_inline struct control *controls(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

static __always_inline struct capture_counters *counters_of(__u32 source, __u32 direction)
{
	__u32 key = source * 2 + direction;

	return bpf_map_lookup_elem(&counters, &key);
}

/* Programs may be interrupted by others on the same CPU: hence atomic. */
static __always_inline void count(struct capture_count *line, __u64 bytes)
{
	__sync_fetch_and_add(&line->events, 1);
	__sync_fetch_and_add(&line->bytes, bytes);
}

/*
 * Body of a function that copies `left` bytes (at most EVENT_BYTES_MAX) behind the head of an event. LOAD(to, at, n) copies n
 * source bytes from position `at`, n a constant except for the last 63 bytes. Returns from the function: 0, or -1.
 *
 * A slice of a dynptr has a constant length for the verifier, so the bytes go in slices of decreasing powers of two.
 * That needs no kernel function newer than the dynptr itself (5.19).
 */
#define COPY_SLICE(ptr, at, left, size, LOAD)                                          \
	if (left >= size) {                                                            \
		void *to = bpf_dynptr_data(ptr, sizeof(struct event_head) + at, size); \
		if (!to || LOAD(to, at, size))                                         \
			return -1;                                                     \
		at += size;                                                            \
		left -= size;                                                          \
	}

#define COPY_BYTES(ptr, left, LOAD)                                                          \
	do {                                                                                 \
		__u32 at = 0;                                                                \
		for (int slice = 0; slice < 15; slice++) {                                   \
			if (left < 4096)                                                     \
				break;                                                       \
			COPY_SLICE(ptr, at, left, 4096, LOAD)                                \
		}                                                                            \
		COPY_SLICE(ptr, at, left, 2048, LOAD)                                        \
		COPY_SLICE(ptr, at, left, 1024, LOAD)                                        \
		COPY_SLICE(ptr, at, left, 512, LOAD)                                         \
		COPY_SLICE(ptr, at, left, 256, LOAD)                                         \
		COPY_SLICE(ptr, at, left, 128, LOAD)                                         \
		COPY_SLICE(ptr, at, left, 64, LOAD)                                          \
		if (left > 0) {                                                              \
			void *to = bpf_dynptr_data(ptr, sizeof(struct event_head) + at, 64); \
			__u32 rest = left - 1;                                               \
			/* Linux 6.1 forgets that `left` is not 0. */                        \
			barrier_var(rest);                                                   \
			if (!to || LOAD(to, at, (rest & 63) + 1))                            \
				return -1;                                                   \
		}                                                                            \
		return 0;                                                                    \
	} while (0)

/* Bytes to reserve for a payload: its last slice is one of 64. */
static __always_inline __u32 event_size(__u32 len)
{
	return sizeof(struct event_head) + ((len + 63) & ~63u);
}

/* An IPv4 client of an IPv6 socket: packets show the IPv4 address. */
static __always_inline int unmap_address(__u8 *address)
{
	__u32 *words = (__u32 *)address;

	if (words[0] != 0 || words[1] != 0 || words[2] != bpf_htonl(0xffff))
		return 0;
	words[0] = words[3];
	words[2] = 0;
	words[3] = 0;
	return 1;
}

/*
 * By the upper bits of a product (Knuth's multiplicative hash): connect() prefers ports of one parity, and of those of a busy client the lower bits would
 * leave half of the rings empty.
 */
static __always_inline void *ring_for(__u32 hash)
{
	__u32 key = hash * 0x9e3779b1u >> 16 & rings_mask;

	return bpf_map_lookup_elem(&rings, &key);
}

/*
 * Whether the ring has no room for an event with payload, of so many bytes in all. Not all of a ring is for them: what a closed socket tells
 * shows whether its last bytes are missing, and must not be lost in the burst that they were lost in.
 */
static __always_inline int is_full(void *ring, __u32 size)
{
	return bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA) + size > ring_payload_bytes;
}

/*
 * Part of a function: records an event with `len` bytes of payload, if they are from 1 to `size` (a power of two), and returns from the
 * function: 0, -1 when the ring was full, `fault` when LOAD failed (see COPY_BYTES). A place of constant size can be written to without
 * a dynptr, which takes twice as many calls of the kernel, and these are most of what an event costs.
 */
#define RECORD_WITHIN(size, ring, head, len, LOAD, fault)                                                \
	if (len - 1 < size) {                                                                            \
		struct event_head *event = NULL;                                                         \
		__u32 rest = len - 1;                                                                    \
		if (!is_full(ring, sizeof(*event) + size))                                               \
			event = bpf_ringbuf_reserve(ring, sizeof(*event) + size, 0);                     \
		if (!event)                                                                              \
			return -1;                                                                       \
		*event = *head;                                                                          \
		barrier_var(rest);                                                                       \
		if (LOAD((void *)(event + 1), 0, (rest & (size - 1)) + 1)) {                             \
			bpf_ringbuf_discard(event, BPF_RB_NO_WAKEUP);                                    \
			return fault;                                                                    \
		}                                                                                        \
		bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);                                             \
		return 0;                                                                                \
	}

#define RECORD_SMALL(ring, head, len, LOAD, fault)             \
	RECORD_WITHIN(64, ring, head, len, LOAD, fault)        \
	RECORD_WITHIN(128, ring, head, len, LOAD, fault)       \
	RECORD_WITHIN(256, ring, head, len, LOAD, fault)       \
	RECORD_WITHIN(512, ring, head, len, LOAD, fault)       \
	RECORD_WITHIN(1024, ring, head, len, LOAD, fault)

/* Sends an event that has no payload. Even these may find the ring full, when thousands of connections come and go within it: then
 * what is missing may be more than the trace knows, and the account says so. */
static __always_inline void send_head(const struct event_head *head, __u32 hash)
{
	__u32 source = head->kind == EVENT_CALL || head->kind == EVENT_EXIT;
	struct capture_counters *account = counters_of(source, head->direction);
	void *ring = ring_for(hash);

	if (ring && bpf_ringbuf_output(ring, (void *)head, sizeof(*head), BPF_RB_NO_WAKEUP) && account)
		count(&account->unheard, 0);
}

#endif /* CAPTURE_BPF_H */
