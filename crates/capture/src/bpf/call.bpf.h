/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Source "calls": what the probes of all servers share. A probe tells which session a call belongs to, and where its bytes are; this
 * counts them, gives them their position, and copies them into a ring.
 *
 * May read user memory only where it is present; what cannot be read is lost and counted, the position goes on.
 */
#ifndef CALL_BPF_H
#define CALL_BPF_H

#include "capture.bpf.h"

enum session_kind {
	SESSION_NEW = 0, /* or of a process that is no child of the wanted server, yet: it may have been started again just now */
	SESSION_FOREIGN = 1, /* not wanted, or not understood */
	SESSION_UNIX = 2,
	SESSION_TCP = 3,       /* left to the packets, unless it is encrypted */
	SESSION_ENCRYPTED = 4,
};

/* What is remembered of a probed session. */
struct session {
	__u64 start; /* tells it from an earlier one of the same process, or of the same number */
	__u64 read;
	__u64 written;
	__u32 kind;
	__u32 responded; /* response bytes recorded since the last request byte */
	struct peer_key peer;
	__u8 local[16];
	__u16 family;
	__u16 tls; /* MariaDB and MySQL: it has turned to TLS */
};

/* Hits by kind, for the self-test: a probe that is attached and never called is an error. Each CPU has its own, as it has its own accounts:
 * processors that write to one place in turn wait for each other. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 8);
	__type(key, __u32);
	__type(value, __u64);
} hits SEC(".maps");

#define HIT_READ 0
#define HIT_WRITE 1
#define HIT_ACTIVITY 2
#define HIT_LAYOUT 3 /* a connection of which the ends were not understood */

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

/* The events of a session are all in one ring; of a TCP connection in the same one as its packets. */
static __always_inline __u32 ring_hash(const struct event_head *head)
{
	return head->remote_port ? head->remote_port : head->pid ^ (__u32)head->cookie;
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
	ring = ring_for(ring_hash(head));
	if (!ring)
		return -1;
	RECORD_SMALL(ring, head, len, LOAD_USER, -2);
	if (is_full(ring, event_size(len)))
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

static __always_inline void unmap_session(struct session *session)
{
	unmap_address(session->local);
	if (unmap_address(session->peer.remote))
		session->family = AF_INET;
}

static __always_inline void fill(struct event_head *head, struct session *session, __u64 ts_ns)
{
	head->ts_ns = ts_ns;
	head->cookie = session->start;
	head->pid = bpf_get_current_pid_tgid() >> 32;
	head->family = session->family;
	head->remote_port = session->peer.remote_port;
	head->local_port = session->peer.local_port;
	__builtin_memcpy(head->remote, session->peer.remote, sizeof(head->remote));
	__builtin_memcpy(head->local, session->local, sizeof(head->local));
}

/* The same, and counts them. This and the next are functions of their own so that the verifier walks them once, and not for each
 * state of their callers. */
__noinline int record_counted(const struct event_head *head, __u64 from)
{
	struct capture_counters *account;
	int result;

	if (!head)
		return 0;
	account = counters_of(1, head->direction);
	result = record_call(head, from);
	if (!account)
		return 0;
	/* Without the event nobody knows that bytes before it were left out: they are a part of its hole. */
	if (result) {
		count(result == -1 ? &account->lost : &account->fault, head->skipped + head->len);
	} else {
		count(&account->recorded, head->len);
		if (head->skipped)
			__sync_fetch_and_add(&account->filtered.bytes, head->skipped);
	}
	return 0;
}

/* `left` bytes from `from`, in as many events as it takes. */
__noinline int record_events(struct event_head *head, __u64 from, __u64 left)
{
	struct capture_counters *account;

	if (!head)
		return 0;
	for (__u32 i = 0; i < CALL_EVENTS_MAX; i++) {
		__u32 piece = left > EVENT_BYTES_MAX ? EVENT_BYTES_MAX : left;

		head->len = piece;
		record_counted(head, from);
		left -= piece;
		if (left == 0)
			return 0;
		from += piece;
		head->offset += piece;
		head->skipped = 0;
	}
	account = counters_of(1, head->direction);
	if (account)
		count(&account->fault, left);
	return 0;
}

/*
 * `n` bytes of the session's plain text, at `from`. `flags`: of the events. `entered`: when the call began, which is the time of a
 * response: before the call returns its reader may have it, and have said the next thing on another session, which must not be the
 * earlier of the two. A request is there only when the call has returned.
 */
static __always_inline void call(struct session *session, __u32 direction, __u64 entered, __u64 from, __u64 n,
				 __u8 flags)
{
	struct event_head head = { .kind = EVENT_CALL, .direction = direction, .flags = flags };
	struct capture_counters *account = counters_of(1, direction);
	__u64 left = n;

	fill(&head, session, direction == DIRECTION_BACKEND ? entered : bpf_ktime_get_ns());
	if (direction == DIRECTION_FRONTEND) {
		head.offset = session->read;
		session->read += n;
		session->responded = 0;
	} else {
		head.offset = session->written;
		session->written += n;
	}
	if (!account)
		return;
	count(&account->seen, n);
	if (direction == DIRECTION_BACKEND && response_whole_bytes != RESPONSE_ALL) {
		if (n <= response_whole_bytes && session->responded <= response_whole_bytes - (__u32)n) {
			session->responded += n;
		} else {
			session->responded = response_whole_bytes;
			if (n > response_tail_bytes) {
				__u32 skip = n - response_tail_bytes;

				head.skipped = skip;
				head.offset += skip;
				from += skip;
				left -= skip;
			}
			if (left == 0) {
				count(&account->filtered, head.skipped);
				return;
			}
		}
	}
	record_events(&head, from, left);
}

/* The session is over: how much it read and wrote in all. */
static __always_inline void send_exit(struct session *session)
{
	struct event_head head = { .kind = EVENT_EXIT };

	fill(&head, session, bpf_ktime_get_ns());
	head.offset = session->read;
	head.more = session->written;
	send_head(&head, ring_hash(&head));
}

/*
 * The text of what a session runs, `len` bytes of at most ACTIVITY_BYTES_MAX. The pieces of a long one are told one after the other, with the length
 * of all, so that a part of it is not taken for the statement. A text goes where as much room again is left for what is recorded; else it is
 * told when it is next used.
 */
__noinline int record_text(struct event_head *head, __u64 text, __u32 len)
{
	void *ring;

	if (!head || len > ACTIVITY_BYTES_MAX)
		return 0;
	head->more = len;
	ring = ring_for(ring_hash(head));
	if (!ring || is_full(ring, 2 * len))
		return 0;
	for (__u32 i = 0; i < CALL_EVENTS_MAX; i++) {
		__u32 left = len - (__u32)head->offset;

		head->len = left > EVENT_BYTES_MAX ? EVENT_BYTES_MAX : left;
		if (record_call(head, text + head->offset))
			return 0;
		head->offset += head->len;
		if (head->offset >= len)
			return 0;
	}
	return 0;
}

#endif /* CALL_BPF_H */
