/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The tap: what a lane forwards for a client that user space marked is copied into a ring buffer.
 *
 * Invariants:
 * - Records of requests are in the ring before the server can answer them, records of responses before the client can
 *   hear them, and the end of a transaction before the beginning of the client's next one: its place is reserved
 *   before the compare-and-swap that releases the link.
 * - Without room, the rest of the transaction is not told either. User space sees by positions and generations of
 *   the link what it did not get. Of a client that waits for mirrors no response is lost: without room it is for user space.
 * - Without tap_works the verifier removes all of this, and the ring is not made. Global functions look at it themselves:
 *   before Linux 6.8 the verifier walks them whether anybody calls them or not.
 */
#ifndef TAP_BPF_H
#define TAP_BPF_H

#include "lanes.bpf.h"
#include "tap.h"

const volatile __u32 tap_works = 0;
/* Data in the ring from which on its reader is woken in the middle of a transaction too. */
const volatile __u32 tap_wake_bytes = 1 << 20;

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} taps SEC(".maps");

/* Bytes of a chunk in its last record; the front before them is a multiple of TAP_LAST_BYTES. */
static __always_inline __u32 tap_rest(__u32 length)
{
	length--;
	barrier_var(length);
	return (length & (TAP_LAST_BYTES - 1)) + 1;
}

static __always_inline int tap_wanted(struct client_slot *c)
{
	return tap_works && *(volatile __u32 *)&c->tap;
}

/* Whether a request with this link word is to wait for mirrors: they have not answered all that was forwarded before. */
static __always_inline int tap_waits(struct client_slot *c, __u64 link)
{
	__u32 tap;

	if (!tap_works)
		return 0;
	tap = *(volatile __u32 *)&c->tap;
	return tap & TAP_WAITS && !(link & (tap & TAP_STEPS ? LINK_PENDING_MASK | LINK_OPEN : LINK_LINKED)) &&
	       (tap >> TAP_AT_SHIFT) != (__u32)c->req_fwd << TAP_AT_SHIFT >> TAP_AT_SHIFT;
}

/* The reader is woken at the end of a transaction: before, there is little that it could do, unless mirrors get statements as they come. */
static __always_inline __u64 tap_wake(int at_once)
{
	return at_once || bpf_ringbuf_query(&taps, BPF_RB_AVAIL_DATA) > tap_wake_bytes ? BPF_RB_FORCE_WAKEUP
										       : BPF_RB_NO_WAKEUP;
}

struct tap_copy {
	void *source;
	__u32 client;
	__u32 kind;
	__u32 front;
	__u32 failed;
};

/* Copies the i-th piece of a chunk's front. */
#define TAP_STEP(name, load)                                                                       \
	static long name(__u32 i, void *context)                                                   \
	{                                                                                          \
		struct tap_copy *t = context;                                                      \
		__u32 off = i * TAP_PIECE_BYTES, n = t->front - off;                               \
		struct tap_piece *piece;                                                           \
                                                                                                   \
		if (n > TAP_PIECE_BYTES)                                                           \
			n = TAP_PIECE_BYTES;                                                       \
		n = tap_piece_length(n);                                                           \
		piece = bpf_ringbuf_reserve(&taps, sizeof(*piece), 0);                             \
		if (!piece) {                                                                      \
			t->failed = 1;                                                             \
			return 1;                                                                  \
		}                                                                                  \
		piece->head.client = t->client;                                                    \
		piece->head.kind = t->kind;                                                        \
		piece->head.flags = TAP_PIECE;                                                     \
		piece->head.length = n;                                                            \
		piece->head.chunk = 0;                                                             \
		piece->head.link = 0;                                                              \
		piece->head.pad = 0;                                                               \
		piece->head.position = off;                                                        \
		piece->head.requests = 0;                                                          \
		piece->head.at_ns = 0;                                                             \
		if (load(t->source, off, piece->bytes, n))                                         \
			t->failed = 1;                                                             \
		bpf_ringbuf_submit(piece, BPF_RB_NO_WAKEUP);                                       \
		return !!t->failed;                                                                \
	}

/* 1 to TAP_PIECE_BYTES already, in a form from which every verifier sees that. */
static __always_inline __u32 tap_piece_length(__u32 n)
{
	n--;
	barrier_var(n);
	return (n & (TAP_PIECE_BYTES - 1)) + 1;
}

static __always_inline long tap_load_skb(struct __sk_buff *skb, __u32 off, void *to, __u32 n)
{
	return bpf_skb_load_bytes(skb, off, to, n);
}

/* The send is contiguous: response_msg saw to that. */
static __always_inline long tap_load_msg(struct sk_msg_md *msg, __u32 off, void *to, __u32 n)
{
	if (off > msg->size || n > msg->size - off || off >= 0xffff)
		return -1;
	return bpf_probe_read_kernel(to, n, (__u8 *)msg->data + off);
}

TAP_STEP(tap_step_skb, tap_load_skb)
TAP_STEP(tap_step_msg, tap_load_msg)

#define TAP_PIECES(length) (((length) - tap_rest(length) + TAP_PIECE_BYTES - 1) / TAP_PIECE_BYTES)

/* The front of a chunk of length bytes; 0: done. Global functions, which the verifier walks once and not on each path. */
__noinline int tap_front_skb(struct __sk_buff *skb, __u32 client, __u32 kind, __u32 length)
{
	struct tap_copy t = {
		.source = skb, .client = client, .kind = kind, .front = length - tap_rest(length),
	};

	if (!tap_works)
		return -1;
	bpf_loop(TAP_PIECES(length), tap_step_skb, &t, 0);
	return t.failed | unknown_zero();
}

__noinline int tap_front_msg(struct sk_msg_md *msg, __u32 client, __u32 kind, __u32 length)
{
	struct tap_copy t = {
		.source = msg, .client = client, .kind = kind, .front = length - tap_rest(length),
	};

	if (!tap_works)
		return -1;
	bpf_loop(TAP_PIECES(length), tap_step_msg, &t, 0);
	return t.failed | unknown_zero();
}

/*
 * The record that ends a chunk, filled but for what is known later. 0: it is not told. A number besides the pointer, because verifiers
 * before Linux 6.4 walk both branches when a program asks a second time whether memory of a ring is there.
 */
#define TAP_LAST(name, type, front, load)                                                          \
	static __always_inline __u64 name(type *source, __u32 client, __u32 kind, __u32 length,         \
					  struct tap_last **told)                                  \
	{                                                                                          \
		__u32 rest = tap_rest(length);                                                     \
		struct tap_last *last;                                                             \
		__u64 tells = 1;                                                                   \
                                                                                                   \
		if (length > rest && front(source, client, kind, length))                          \
			goto lost;                                                                 \
		last = bpf_ringbuf_reserve(&taps, sizeof(*last), 0);                               \
		if (!last)                                                                         \
			goto lost;                                                                 \
		last->head.client = client;                                                        \
		last->head.kind = kind;                                                            \
		last->head.flags = 0;                                                              \
		last->head.length = rest;                                                          \
		last->head.chunk = length;                                                         \
		last->head.link = 0;                                                               \
		last->head.pad = 0;                                                                \
		last->head.position = 0;                                                           \
		last->head.requests = 0;                                                           \
		*told = last;                                                                      \
		if (!load(source, length - rest, last->bytes, rest)) {                             \
			barrier_var(tells);                                                        \
			return tells;                                                              \
		}                                                                                  \
		bpf_ringbuf_discard(last, BPF_RB_NO_WAKEUP);                                       \
	lost:                                                                                      \
		count_counter(COUNTER_TAPS_LOST);                                                  \
		return 0;                                                                          \
	}

TAP_LAST(tap_last_skb, struct __sk_buff, tap_front_skb, tap_load_skb)
TAP_LAST(tap_last_msg, struct sk_msg_md, tap_front_msg, tap_load_msg)

/*
 * Tells a chunk of requests that is going to be forwarded on the link of this generation, with the client's own names of
 * statements in it. Global, as tap_front_skb().
 */
__noinline int tap_request(struct __sk_buff *skb, __u32 client, __u32 link, __u32 flags)
{
	struct client_slot *c = bpf_map_lookup_elem(&clients, &client);
	struct tap_last *last;

	if (!tap_works || !c || !skb->len)
		return 0;
	if (flags & TAP_BEGIN)
		c->tap_lost = 0;
	else if (c->tap_lost)
		return 0;
	if (!tap_last_skb(skb, client, TAP_REQUEST, skb->len, &last)) {
		c->tap_lost = 1;
		return 0;
	}
	last->head.flags = flags;
	last->head.link = link;
	last->head.position = c->req_fwd;
	last->head.at_ns = c->active_ns;
	bpf_ringbuf_submit(last, tap_wake(*(volatile __u32 *)&c->tap & TAP_STEPS));
	count_counter(COUNTER_TAPS);
	return 0;
}

/* A response has no record: it is for user space if nothing of its client may be missing, else the rest of the transaction is left out. */
static __always_inline __u32 tap_without(struct client_slot *c)
{
	if (*(volatile __u32 *)&c->tap & TAP_WAITS)
		return REASON_MIRROR;
	c->tap_lost = 1;
	return REASON_NONE;
}

/* What commit_response() knew when it changed the link, for the record of that chunk. */
struct tap_commit {
	__u32 link;
	__u64 requests;
};

/* Tells a chunk of responses, if it has a record, or forgets it: it was not forwarded. */
static __always_inline void tap_response(__u64 tells, struct tap_last *last, const struct tap_commit *commit,
					 __u32 position, int forwarded, int ends)
{
	if (!tells)
		return;
	if (!forwarded) {
		bpf_ringbuf_discard(last, BPF_RB_NO_WAKEUP);
		return;
	}
	last->head.flags = ends ? TAP_END : 0;
	last->head.link = commit->link;
	last->head.position = position;
	last->head.requests = commit->requests;
	last->head.at_ns = bpf_ktime_get_ns();
	bpf_ringbuf_submit(last, tap_wake(ends));
	count_counter(COUNTER_TAPS);
}

#endif /* TAP_BPF_H */
