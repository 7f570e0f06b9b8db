/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Source "calls": secure_read and secure_write of PostgreSQL, which move plain text whatever TLS, GSSAPI or sockets do below.
 *
 * Called by uprobes in every process that runs the executable; only children of the wanted postmaster count, and of their
 * connections only those that the packets do not show: Unix sockets, and TCP that is encrypted. May read user memory only
 * where it is present; what cannot be read is lost and counted, the position goes on.
 */
#ifndef PROBE_BPF_H
#define PROBE_BPF_H

#include "capture.bpf.h"

/*
 * struct Port, libpq-be.h, PostgreSQL 14 to 18: pgsocket sock; bool noblock; ProtocolVersion proto; SockAddr laddr, raddr;
 * SockAddr is a sockaddr_storage of 128 bytes and its length, 136 with padding.
 */
#define PORT_LADDR 16
#define PORT_RADDR (PORT_LADDR + 136)

enum backend_kind {
	BACKEND_NEW = 0,
	BACKEND_FOREIGN = 1, /* not of the postmaster, or not understood */
	BACKEND_UNIX = 2,
	BACKEND_TCP = 3,       /* left to the packets, unless it is encrypted */
	BACKEND_ENCRYPTED = 4,
};

/* What is remembered of a process. */
struct backend {
	__u64 start; /* of the process, tells it from an earlier one with the same number */
	__u64 read_buffer;
	__u64 write_buffer; /* of the call under way; 0: not wanted */
	__u64 read;
	__u64 written;
	__u32 kind;
	__u32 responded; /* response bytes recorded since the last request byte */
	struct peer_key peer;
	__u8 local[16];
	__u16 family;
	__u16 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct backend);
} backends SEC(".maps");

/* Hits by kind, for the self-test: a probe that is attached and never called is an error. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 8);
	__type(key, __u32);
	__type(value, __u64);
} hits SEC(".maps");

#define HIT_READ 0
#define HIT_WRITE 1
#define HIT_ACTIVITY 2
#define HIT_LAYOUT 3 /* struct Port was not understood */

static __always_inline void hit(__u32 key)
{
	__u64 *value = bpf_map_lookup_elem(&hits, &key);

	if (value)
		__sync_fetch_and_add(value, 1);
}

#define LOAD_USER(to, at, n) bpf_probe_read_user(to, n, (void *)(from + at))

static __always_inline int copy_user(struct bpf_dynptr *ptr, __u64 from, __u32 left)
{
	COPY_BYTES(ptr, left, LOAD_USER);
}

/* One event with `head->len` bytes from `from`. Returns 0, -1 when the ring was full, -2 when they could not be read. */
__noinline int record_call(const struct event_head *head, __u64 from)
{
	struct bpf_dynptr ptr;
	void *ring;
	__u32 len;

	if (!head)
		return -1;
	len = head->len;
	if (len > EVENT_BYTES_MAX)
		return -1;
	ring = ring_for(head->pid);
	if (!ring)
		return -1;
	if (bpf_ringbuf_reserve_dynptr(ring, event_size(len), 0, &ptr) ||
	    bpf_dynptr_write(&ptr, 0, (void *)head, sizeof(*head), 0)) {
		bpf_ringbuf_discard_dynptr(&ptr, BPF_RB_NO_WAKEUP);
		return -1;
	}
	if (copy_user(&ptr, from, len)) {
		bpf_ringbuf_discard_dynptr(&ptr, BPF_RB_NO_WAKEUP);
		return -2;
	}
	bpf_ringbuf_submit_dynptr(&ptr, BPF_RB_NO_WAKEUP);
	return 0;
}

static __always_inline int read_address(__u64 at, __u16 *family, __u8 *address, __u16 *port)
{
	struct {
		__u16 family;
		__be16 port;
		__u8 rest[20]; /* IPv4: address; IPv6: flow, address */
	} name = {};

	if (bpf_probe_read_user(&name, sizeof(name), (void *)at))
		return -1;
	*family = name.family;
	*port = bpf_ntohs(name.port);
	if (name.family == AF_INET)
		__builtin_memcpy(address, name.rest, 4);
	else if (name.family == AF_INET6)
		__builtin_memcpy(address, name.rest + 4, 16);
	return 0;
}

/* An IPv4 client of an IPv6 socket: packets show the IPv4 address. */
static __always_inline void unmap_address(__u8 *address)
{
	__u32 *words = (__u32 *)address;

	if (words[0] == 0 && words[1] == 0 && words[2] == bpf_htonl(0xffff)) {
		words[0] = words[3];
		words[2] = 0;
		words[3] = 0;
	}
}

static __always_inline void decide(struct backend *backend, struct task_struct___capture *task, __u64 port)
{
	struct control *settings = controls();
	__u16 family = 0, local_port = 0;

	backend->kind = BACKEND_FOREIGN;
	if (!settings || settings->postmaster == 0 || BPF_CORE_READ(task, real_parent, tgid) != (int)settings->postmaster)
		return;
	backend->start = BPF_CORE_READ(task, start_boottime);
	if (read_address(port + PORT_LADDR, &backend->family, backend->local, &local_port))
		return;
	if (backend->family == AF_UNIX) {
		backend->kind = BACKEND_UNIX;
		return;
	}
	backend->peer.local_port = local_port;
	if ((backend->family != AF_INET && backend->family != AF_INET6) ||
	    read_address(port + PORT_RADDR, &family, backend->peer.remote, &backend->peer.remote_port) ||
	    family != backend->family) {
		hit(HIT_LAYOUT);
		return;
	}
	if (family == AF_INET6) {
		unmap_address(backend->peer.remote);
		unmap_address(backend->local);
	}
	backend->kind = BACKEND_TCP;
}

static __always_inline struct backend *known(void)
{
	return bpf_task_storage_get(&backends, bpf_get_current_task_btf(), 0, 0);
}

/* What the call that begins is worth: the process, or NULL when it is not wanted. */
static __always_inline struct backend *wanted(__u64 port)
{
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	struct backend *backend =
		bpf_task_storage_get(&backends, (void *)task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!backend)
		return NULL;
	if (backend->kind == BACKEND_NEW)
		decide(backend, task, port);
	/* Without the packets, all of TCP is left to the probes. */
	if (backend->kind == BACKEND_TCP &&
	    (server_port == 0 || bpf_map_lookup_elem(&encrypted, &backend->peer)))
		backend->kind = BACKEND_ENCRYPTED;
	return backend->kind == BACKEND_UNIX || backend->kind == BACKEND_ENCRYPTED ? backend : NULL;
}

static __always_inline void fill(struct event_head *head, struct backend *backend)
{
	head->ts_ns = bpf_ktime_get_ns();
	head->cookie = backend->start;
	head->pid = bpf_get_current_pid_tgid() >> 32;
	head->family = backend->family;
	head->remote_port = backend->peer.remote_port;
	head->local_port = backend->peer.local_port;
	__builtin_memcpy(head->remote, backend->peer.remote, sizeof(head->remote));
	__builtin_memcpy(head->local, backend->local, sizeof(head->local));
}

static __always_inline void call(struct backend *backend, __u32 direction, __u64 from, __u64 n)
{
	struct event_head head = { .kind = EVENT_CALL, .direction = direction };
	struct capture_counters *account = counters_of(1, direction);
	__u64 left = n;

	fill(&head, backend);
	if (direction == DIRECTION_FRONTEND) {
		head.offset = backend->read;
		backend->read += n;
		backend->responded = 0;
	} else {
		head.offset = backend->written;
		backend->written += n;
	}
	if (!account)
		return;
	count(&account->seen, n);
	if (direction == DIRECTION_BACKEND) {
		if (n <= response_whole_bytes && backend->responded <= response_whole_bytes - (__u32)n) {
			backend->responded += n;
		} else {
			backend->responded = response_whole_bytes;
			if (n > response_tail_bytes) {
				__u32 skip = n - response_tail_bytes;

				__sync_fetch_and_add(&account->filtered.bytes, skip);
				head.skipped = skip;
				head.offset += skip;
				from += skip;
				left -= skip;
			}
			if (left == 0) {
				__sync_fetch_and_add(&account->filtered.events, 1);
				return;
			}
		}
	}
	for (__u32 i = 0; i < CALL_EVENTS_MAX; i++) {
		__u32 piece = left > EVENT_BYTES_MAX ? EVENT_BYTES_MAX : left;
		int result;

		head.len = piece;
		result = record_call(&head, from);
		if (result == 0)
			count(&account->recorded, piece);
		else if (result == -1)
			count(&account->lost, piece);
		else
			count(&account->fault, piece);
		left -= piece;
		if (left == 0)
			return;
		from += piece;
		head.offset += piece;
		head.skipped = 0;
	}
	count(&account->fault, left);
}

SEC("uprobe")
int read_enter(struct pt_regs *ctx)
{
	struct backend *backend;

	hit(HIT_READ);
	backend = wanted(PT_REGS_PARM1(ctx));
	if (backend)
		backend->read_buffer = PT_REGS_PARM2(ctx);
	return 0;
}

SEC("uretprobe")
int read_exit(struct pt_regs *ctx)
{
	struct backend *backend = known();
	long n = PT_REGS_RC(ctx);
	__u64 from;

	if (!backend || backend->read_buffer == 0)
		return 0;
	from = backend->read_buffer;
	backend->read_buffer = 0;
	if (n > 0)
		call(backend, DIRECTION_FRONTEND, from, n);
	return 0;
}

SEC("uprobe")
int write_enter(struct pt_regs *ctx)
{
	struct backend *backend;

	hit(HIT_WRITE);
	backend = wanted(PT_REGS_PARM1(ctx));
	if (backend)
		backend->write_buffer = PT_REGS_PARM2(ctx);
	return 0;
}

SEC("uretprobe")
int write_exit(struct pt_regs *ctx)
{
	struct backend *backend = known();
	long n = PT_REGS_RC(ctx);
	__u64 from;

	if (!backend || backend->write_buffer == 0)
		return 0;
	from = backend->write_buffer;
	backend->write_buffer = 0;
	if (n > 0)
		call(backend, DIRECTION_BACKEND, from, n);
	return 0;
}

/* A probed process ends: how much it read and wrote in all. */
SEC("raw_tp/sched_process_exit")
int process_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct event_head head = { .kind = EVENT_EXIT };
	struct backend *backend = known();

	if (!backend || (backend->kind != BACKEND_UNIX && backend->kind != BACKEND_ENCRYPTED))
		return 0;
	fill(&head, backend);
	head.offset = backend->read;
	head.more = backend->written;
	send_head(&head, head.pid);
	return 0;
}

/*
 * pgstat_report_activity(state, text): the text of what the backend begins, also of a statement that was prepared before the
 * capture. Attached only while such statements are known. The text is measured first, in steps of 256 bytes.
 */
SEC("uprobe")
int activity(struct pt_regs *ctx)
{
	struct event_head head = { .kind = EVENT_ACTIVITY, .direction = DIRECTION_FRONTEND };
	struct task_struct___capture *task = (void *)bpf_get_current_task_btf();
	struct control *settings = controls();
	__u64 text = PT_REGS_PARM2(ctx);
	char step[256];
	__u32 len = 0;
	long n;

	if (text == 0 || !settings || BPF_CORE_READ(task, real_parent, tgid) != (int)settings->postmaster)
		return 0;
	hit(HIT_ACTIVITY);
	for (__u32 i = 0; i < ACTIVITY_BYTES_MAX / 256; i++) {
		n = bpf_probe_read_user_str(step, sizeof(step), (void *)(text + len));
		if (n < 0)
			return 0;
		/* The count includes a NUL, which replaces the last byte of a string that goes on. */
		len += n > 0 ? n - 1 : 0;
		if (n < (long)sizeof(step))
			break;
	}
	head.ts_ns = bpf_ktime_get_ns();
	head.cookie = BPF_CORE_READ(task, start_boottime);
	head.pid = bpf_get_current_pid_tgid() >> 32;
	head.len = len;
	record_call(&head, text);
	return 0;
}

#endif /* PROBE_BPF_H */
