// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The lane programs: request_skb and response_skb (lane D), response_msg (lanes A and B), request_msg (lane B). Gauges for user space are in
 * gauges.bpf.h.
 *
 * Invariants:
 * - A chunk is either forwarded whole or passed to user space whole, and counted in exactly one of the two.
 * - Nothing is changed before the whole chunk is known to be allowed; the compare-and-swap of the client's link
 *   word is the point of no return.
 * - Once a direction is with user space, only user space gives it back.
 */
#include "kernel.bpf.h"
#include "bits.bpf.h"
#include "lanes.bpf.h"
#include "request.bpf.h"
#include "response.bpf.h"
#include "gauges.bpf.h"

/* One to five bytes; the compiler must not drop the bounds, the verifier does not know them. */
static __always_inline long load_head(struct __sk_buff *skb, __u32 off, void *to, __u32 n)
{
	barrier_var(n);
	if (n < 1 || n > WIRE_HEAD)
		return -1;
	return bpf_skb_load_bytes(skb, off, to, seen_1_to(8, n));
}

/* A send after bpf_msg_pull_data(): contiguous, at most MSG_BYTES_MAX. */
#define MSG_BYTES_MAX 0xfff0u
#define MSG_LOAD(msg, off, to, n)                                                                  \
	({                                                                                         \
		__u32 load_off = (off);                                                            \
		int load_result = -1;                                                              \
		if (load_off < MSG_BYTES_MAX) {                                                    \
			__u8 *load_from = (__u8 *)(msg)->data + load_off;                          \
			if (load_from + (n) <= (__u8 *)(msg)->data_end) {                          \
				__builtin_memcpy(to, load_from, n);                                \
				load_result = 0;                                                   \
			}                                                                          \
		}                                                                                  \
		load_result;                                                                       \
	})

/* A number of bytes that the verifier does not know, up to max. */
static __always_inline long load_some(struct sk_msg_md *msg, __u32 off, void *to, __u32 n, __u32 max)
{
	barrier_var(n);
	if (n < 1 || n > max || off >= MSG_BYTES_MAX || off > msg->size || n > msg->size - off)
		return -1;
	return bpf_probe_read_kernel(to, seen_1_to(max > 8 ? 64 : 8, n), (__u8 *)msg->data + off);
}

/* Likewise, the other way. */
static __always_inline void store_some(struct sk_msg_md *msg, __u32 off, const __u8 *from, __u32 n)
{
	for (__u32 i = 0; i < STATEMENT_NAME_MAX && i < n; i++) {
		__u8 *to = (__u8 *)msg->data + off + i;

		if (off >= MSG_BYTES_MAX - STATEMENT_NAME_MAX || to + 1 > (__u8 *)msg->data_end)
			return;
		*to = from[i];
	}
}

/* A head at the end or the beginning of a send, in part, is not worth a verified path for each length. */
#define MSG_LOAD_HEAD(msg, off, to, n)                                                             \
	((n) == WIRE_HEAD ? MSG_LOAD(msg, off, to, WIRE_HEAD) : load_some(msg, off, to, n, WIRE_HEAD))

#define REQUEST_SOURCE		      struct __sk_buff
#define REQUEST_NAME(x)		      x##_skb
#define REQUEST_SIZE(skb)	      ((skb)->len)
#define REQUEST_LOAD(skb, off, to, n) bpf_skb_load_bytes(skb, off, to, n)
#define REQUEST_STORE(skb, off, from, n) bpf_skb_store_bytes(skb, off, from, n, 0)
#define WIRE_LOAD(skb, off, to, n)    bpf_skb_load_bytes(skb, off, to, n)
#define WIRE_LOAD_N(skb, off, to, n)  load_head(skb, off, to, n)
#include "request_scan.bpf.h"

#define REQUEST_SOURCE		      struct sk_msg_md
#define REQUEST_NAME(x)		      x##_msg
#define REQUEST_SIZE(msg)	      ((msg)->size)
#define REQUEST_LOAD(msg, off, to, n) load_some(msg, off, to, n, STATEMENT_NAME_MAX + 1)
#define REQUEST_STORE(msg, off, from, n) store_some(msg, off, from, n)
#define WIRE_LOAD(msg, off, to, n)    MSG_LOAD(msg, off, to, n)
#define WIRE_LOAD_N(msg, off, to, n)  MSG_LOAD_HEAD(msg, off, to, n)
#include "request_scan.bpf.h"

#define RESPONSE_SOURCE		      struct __sk_buff
#define RESPONSE_NAME(x)	      x##_skb
#define WIRE_LOAD(skb, off, to, n)    bpf_skb_load_bytes(skb, off, to, n)
#define WIRE_LOAD_N(skb, off, to, n)  load_head(skb, off, to, n)
#include "response_scan.bpf.h"

#define RESPONSE_SOURCE		      struct sk_msg_md
#define RESPONSE_NAME(x)	      x##_msg
#define WIRE_LOAD(msg, off, to, n)    MSG_LOAD(msg, off, to, n)
#define WIRE_LOAD_N(msg, off, to, n)  MSG_LOAD_HEAD(msg, off, to, n)
#include "response_scan.bpf.h"

#include "idle.bpf.h"
#include "queue.bpf.h"

/* ---- requests --------------------------------------------------------------------------------------- */

/* Links a client without a server, with one of lane A if local. Returns a reason, or NONE and the server. */
static __always_inline __u32 link_client(struct client_slot *c, __u32 index, struct tcp_sock *tp,
					 struct request_scan *scan, __u64 old, __u64 wanted,
					 __u32 local, struct server_slot **server)
{
	__u32 pool_index = c->pool, server_index;
	struct pool_slot *pool = bpf_map_lookup_elem(&pools, &pool_index);
	struct server_slot *s;
	int taken;
	__u64 new;

	if (!pool || *(volatile __u32 *)&pool->flags)
		return REASON_POOL_CLOSED;
	if (*(volatile __u32 *)&pool->waiters)
		return REASON_WAITERS;
	/* Responses of an earlier link must all be in the socket, or another server's could overtake them. */
	if (seq_missing(&c->tx_expect, &tp->write_seq))
		return REASON_BEHIND;
	taken = take_idle(c, index, pool, local);
	if (taken < 0) {
		if (taken == TAKEN_BEHIND)
			return REASON_BEHIND;
		return taken == TAKEN_UNFIT ? REASON_UNFIT : REASON_NO_SERVER;
	}
	server_index = taken;
	s = bpf_map_lookup_elem(&servers, &server_index);
	if (!s)
		return REASON_NO_SERVER;
	if (scan->uses.count && !has_statements(&scan->uses, server_index)) {
		__sync_lock_test_and_set(&s->peer, 0);
		push_idle(s);
		return REASON_UNPREPARED;
	}

	s->run_bytes = 0;
	if (!c->last_addr)
		c->last_server = server_index;
	c->xact_start_ns = c->query_start_ns = c->active_ns;
	new = LINK_LINKED | wanted | scan->syncs | (__u64)server_index << LINK_SERVER_SHIFT;
	new |= old & LINK_PINNED;
	new |= (old & ~((1ULL << LINK_GEN_SHIFT) - 1)) + (1ULL << LINK_GEN_SHIFT);
	stall();
	if (!__sync_bool_compare_and_swap(&c->link, old, new)) {
		__sync_lock_test_and_set(&s->peer, 0);
		push_idle(s);
		return REASON_LINK_RACE;
	}
	stall();
	__sync_fetch_and_add(&c->links, 1);
	count_counter(COUNTER_LINKS);
	*server = s;
	return REASON_NONE;
}

/* Adds a chunk to a link that stands. */
static __always_inline __u32 extend_link(struct client_slot *c, struct request_scan *scan, __u64 old,
					 __u64 wanted)
{
	for (int i = 0; i < CAS_TRIES; i++) {
		__u64 new = (old & ~LINK_OPEN) | wanted;

		if (old & LINK_HELD)
			return REASON_HELD;
		if (!(old & LINK_LINKED) || scan->copy != !!(old & LINK_COPY))
			return REASON_LINK_RACE;
		if (scan->syncs || !link_pending(old))
			new = (new & ~LINK_EXTENDED) | (wanted & LINK_EXTENDED);
		if (!link_pending(old)) {
			if (!scan->syncs && !(wanted & LINK_OPEN) && !(old & (LINK_STATUS_MASK | LINK_PINNED)))
				return REASON_IDLE_LINK;
		}
		if (link_pending(old) + scan->syncs > PENDING_MAX)
			return REASON_DEPTH;
		new += scan->syncs;
		stall();
		if (old == new || __sync_bool_compare_and_swap(&c->link, old, new)) {
			if (!(old & (LINK_PENDING_MASK | LINK_OPEN))) {
				c->query_start_ns = c->active_ns;
				if (!(old & LINK_STATUS_MASK))
					c->xact_start_ns = c->active_ns;
			}
			return REASON_NONE;
		}
		old = *(volatile __u64 *)&c->link;
	}
	return REASON_LINK_RACE;
}

/* What the link and the requests before say about the chunk that is to be scanned. */
static __always_inline void begin_scan(struct request_scan *scan, struct client_slot *c, __u64 link,
				       struct lane_control *ctl)
{
	scan->uses.count = ctl->zero;
	scan->linked = !!(link & LINK_LINKED);
	scan->copy = !!(link & LINK_COPY);
	scan->pinned = !!(link & LINK_PINNED);
	scan->open = !!(c->flags & CLI_BATCH);
	scan->extended = scan->open; /* of a chunk that only continues a message of the batch */
	scan->unnamed = (UNNAMED_CYCLE | UNNAMED_LINK) & -(__u32)(scan->linked & !!(c->flags & CLI_UNNAMED));
}

/* Forwards one chunk of requests, or says why user space must take it; then nothing was changed. */
static __always_inline __u32 forward_request(struct __sk_buff *skb, struct client_slot *c, __u32 index,
					     struct tcp_sock *tp)
{
	__u64 old = *(volatile __u64 *)&c->link, wanted;
	struct lane_control *ctl = lanes_control();
	struct request_scan scan = {
		.source = skb, .w = c->req, .end = skb->len, .unbound_at = skb->len, .client = index,
	};
	struct server_slot *s = NULL;
	__u32 reason, server, cycle, named;

	if (!ctl || ctl->off)
		return REASON_OFF;
	if (tap_waits(c, old))
		return REASON_MIRROR;
	begin_scan(&scan, c, old, ctl);
	scan_request_skb(&scan);
	if (scan.reason)
		return scan.reason;
	if (scan.syncs > PENDING_MAX)
		return REASON_DEPTH;
	cycle = link_pending(old) || old & LINK_OPEN ? c->cycle_bytes : 0;
	if (cycle + skb->len > request_budget_bytes)
		return REASON_REQUEST_BUDGET;

	/* Now or never: from the point of no return on, renaming cannot fail. */
	if (scan.uses.count && bpf_skb_pull_data(skb, skb->len))
		return REASON_GATHER;
	wanted = (scan.open || !wire_boundary(&scan.w) ? LINK_OPEN : 0) | (scan.extended ? LINK_EXTENDED : 0);
	c->active_ns = bpf_ktime_get_ns();
	if (scan.linked) {
		server = link_server(old);
		s = bpf_map_lookup_elem(&servers, &server);
		if (s && s->flags & SRV_LOCAL && !backend_caught_up(s))
			return REASON_BEHIND;
		/* What was kept of it is perhaps just being put where the backend reads. */
		if (kept_bytes_max && s && c->flags & CLI_HANDED &&
		    *(volatile __u32 *)&s->runs_begin != *(volatile __u32 *)&s->runs_end)
			return REASON_BEHIND;
		if (scan.uses.count && !has_statements(&scan.uses, server))
			return REASON_UNPREPARED;
		/* A session's queue is measured anew when it is empty between two requests, as that of a new link is. */
		if (scan.pinned && s && !link_pending(old) && !seq_missing(&c->tx_expect, &tp->write_seq))
			s->run_bytes = 0;
		reason = extend_link(c, &scan, old, wanted);
		if (reason)
			return reason;
	} else {
		if (!wire_boundary(&c->req) || old & LINK_HELD)
			return REASON_HELD;
		if (kept_bytes_max && old & LINK_KEPT) /* what it said before comes first */
			return REASON_WAITERS;
		reason = link_client(c, index, tp, &scan, old, wanted, 0, &s);
		if (reason && kept_bytes_max)
			return keep_request(skb, c, &scan.uses, index, KEEP(reason, &scan, wanted));
		if (reason)
			return reason;
		server = link_server(*(volatile __u64 *)&c->link);
	}
	if (!s)
		goto no_target;

	if (s->flags & SRV_LOCAL) {
		if (bpf_sk_redirect_map(skb, &backend_socks, server, BPF_F_INGRESS) != SK_PASS)
			goto no_target;
		count_counter(COUNTER_REQUESTS_A);
	} else {
		if (bpf_sk_redirect_map(skb, &server_socks, server, 0) != SK_PASS)
			goto no_target;
		__sync_fetch_and_add(&s->tx_expect, skb->len);
		count_counter(COUNTER_REQUESTS_D);
	}
	if (tap_wanted(c))
		tap_request(skb, index, *(volatile __u64 *)&c->link >> LINK_GEN_SHIFT,
			    (scan.linked ? 0 : TAP_BEGIN) | (link_pending(old) ? TAP_BUSY : 0));
	if (scan.uses.count)
		rename_statements_skb(skb, &scan.uses, server);
	c->req = scan.w;
	named = scan.uses.count || (scan.linked && c->flags & CLI_NAMED);
	c->flags = (scan.unnamed & UNNAMED_LINK ? CLI_UNNAMED : 0) | (scan.open ? CLI_BATCH : 0) | (named ? CLI_NAMED : 0);
	c->cycle_bytes = cycle + skb->len;
	return REASON_NONE;

no_target:
	/* The server is gone. Its ReadyForQuery will not come: take back what was added, keep the link. */
	__sync_fetch_and_sub(&c->link, scan.syncs);
	return REASON_TARGET;
}

/*
 * A FIN without data comes as an skb of length 0. Redirected, it would end the *target*: sk_psock_backlog() takes
 * the 0 that sendmsg returns for a broken pipe (EPIPE on the target, no more sending). So both sk_skb programs pass
 * it, and user space sees the end of the stream.
 *
 * request_skb is called for every segment that a client's socket receives, in softirq, in the sender's system call (loopback)
 * or in the backlog of a system call on this socket; one at a time per socket. The chunk may hold any part of
 * the stream: 1 byte to 64 KiB, and more where what waited was merged (523,864 bytes were seen on loopback).
 */
SEC("sk_skb/verdict")
int request_skb(struct __sk_buff *skb)
{
	__u64 cookie = bpf_get_socket_cookie(skb), before, link;
	struct bpf_sock *sk = skb->sk;
	struct client_slot *c;
	struct tcp_sock *tp;
	__u32 *found, index, reason;

	if (!skb->len)
		return SK_PASS; /* a bare FIN, see above */
	found = bpf_map_lookup_elem(&client_cookie, &cookie);
	if (!found || !sk)
		goto unknown;
	index = *found;
	c = bpf_map_lookup_elem(&clients, &index);
	if (!c)
		goto unknown;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		goto unknown;
	if (cut_overlap(skb, tp, &c->next_seq))
		return SK_DROP;

	before = __sync_fetch_and_add(&c->req_dir, skb->len);
	if (!(before & DIR_USER)) {
		reason = forward_request(skb, c, index, tp);
		if (!reason) {
			stall();
			/* Last: user space reads it as "the program is through with this chunk". */
			*(volatile __u64 *)&c->req_fwd += skb->len;
			*(volatile __u64 *)&c->decided_seq = c->next_seq;
			return SK_PASS;
		}
		if (kept_bytes_max && reason == KEPT) {
			stall();
			*(volatile __u64 *)&c->req_fwd += skb->len;
			*(volatile __u64 *)&c->decided_seq = c->next_seq;
			return SK_DROP;
		}
		client_up(c, index, reason);
	}
	link = *(volatile __u64 *)&c->link;
	if (!(link & (LINK_LINKED | LINK_KEPT)) && !seq_missing(&c->tx_expect, &tp->write_seq) && (!apps_work || direct_settled(c)))
		*(volatile __u64 *)&c->clear = CLEAR_KNOWN | link >> LINK_GEN_SHIFT;
	else /* or an old one would fit when the generations have come round */
		*(volatile __u64 *)&c->clear = 0;
	stall();
	*(volatile __u64 *)&c->req_passed += skb->len;
	*(volatile __u64 *)&c->decided_seq = c->next_seq;
	count_counter(COUNTER_PASSED_CLIENT);
	return SK_PASS;
unknown:
	count(REASON_UNKNOWN);
	return SK_PASS;
}

#include "direct.bpf.h"

/* ---- responses -------------------------------------------------------------------------------------- */

/* The client that a server is linked to, and its slot index. */
static __always_inline struct client_slot *linked_client(struct server_slot *s, __u32 *index)
{
	__u64 peer = *(volatile __u64 *)&s->peer;

	if (!(peer & PEER_LINKED))
		return NULL;
	*index = peer;
	return bpf_map_lookup_elem(&clients, index);
}

/* Session pooling; it does not change while a program owns the responses. */
static __always_inline __u8 is_pinned(struct client_slot *c)
{
	return !!(*(volatile __u64 *)&c->link & LINK_PINNED);
}

/* The queue of redirected bytes that are not in the client's TCP send queue yet. */
static __always_inline __u32 queue_reason(struct server_slot *s, struct client_slot *c, __u32 client,
					  __u32 len)
{
	struct bpf_sock *sk;
	struct tcp_sock *tp;
	__s32 queued = 0;

	if (response_run_bytes_max && s->run_bytes + (__u64)len > response_run_bytes_max)
		return REASON_RESPONSE_RUN;
	if (s->run_bytes + (__u64)len <= GAUGE_AFTER_BYTES)
		return REASON_NONE;
	sk = bpf_map_lookup_elem(&client_socks, &client);
	if (!sk)
		return REASON_TARGET;
	tp = bpf_skc_to_tcp_sock(sk);
	if (tp)
		queued = seq_missing(&c->tx_expect, &tp->write_seq);
	bpf_sk_release(sk);
	return queued > 0 && (__u32)queued > response_queue_bytes_max ? REASON_RESPONSE_QUEUE : REASON_NONE;
}

static __always_inline __u32 forward_response(struct __sk_buff *skb, struct server_slot *s, __u32 server,
					      struct response_commit *done, __u32 *client)
{
	struct response_scan scan = { .source = skb, .w = s->resp, .end = skb->len, .error_at = skb->len };
	struct client_slot *c = linked_client(s, client);
	struct tap_last *tap = NULL;
	__u32 reason, position;
	__u64 tells = 0;

	if (!c) {
		drop_from_idle(s);
		return REASON_NO_CLIENT;
	}
	scan.pinned = is_pinned(c);
	reason = queue_reason(s, c, *client, skb->len);
	if (reason)
		return reason;
	scan_response_skb(&scan);
	if (scan.reason)
		return scan.reason;
	position = s->run_bytes;
	if (tap_wanted(c) && !c->tap_lost) {
		tells = tap_last_skb(skb, *client, TAP_RESPONSE, skb->len, &tap);
		if (!tells && tap_without(c))
			return REASON_MIRROR;
	}
	commit_response(&scan, s, server, c, skb->len, ~0u, done);
	tap_response(tells, tap, &done->tap, position, !done->reason, done->released);
	return done->reason;
}

/*
 * Lane D. Called for every segment that the pooler's socket to a server receives; contexts as request_skb.
 */
SEC("sk_skb/verdict")
int response_skb(struct __sk_buff *skb)
{
	__u64 cookie = bpf_get_socket_cookie(skb), before;
	struct response_commit done = {};
	__u32 *found, index, reason, client = 0;
	struct bpf_sock *sk = skb->sk;
	struct server_slot *s;
	struct tcp_sock *tp;

	if (!skb->len)
		return SK_PASS;
	found = bpf_map_lookup_elem(&server_cookie, &cookie);
	if (!found)
		goto unknown;
	index = *found;
	s = bpf_map_lookup_elem(&servers, &index);
	if (!s)
		goto unknown;
	tp = sk ? bpf_skc_to_tcp_sock(sk) : NULL;
	if (!tp)
		goto unknown;
	if (cut_overlap(skb, tp, &s->next_seq))
		return SK_DROP;

	before = __sync_fetch_and_add(&s->dir, skb->len);
	if (!(before & DIR_USER)) {
		reason = forward_response(skb, s, index, &done, &client);
		if (!reason) {
			int verdict = bpf_sk_redirect_map(skb, &client_socks, client, 0);

			stall();
			/* Drops only bytes for a socket that is closed already. */
			if (verdict != SK_PASS)
				count(REASON_TARGET);
			if (done.hold)
				server_up(s, index, done.hold);
			*(volatile __u64 *)&s->fwd += skb->len;
			count_counter(COUNTER_RESPONSES_D);
			if (done.xacts)
				add_counter(COUNTER_XACTS_D, done.xacts);
			if (done.released)
				release_server(s);
			return verdict;
		}
		server_up(s, index, reason);
	}
	stall();
	*(volatile __u64 *)&s->passed += skb->len;
	count_counter(COUNTER_PASSED_SERVER);
	return SK_PASS;
unknown:
	count(REASON_UNKNOWN);
	return SK_PASS;
}

/* Lane A: the direction goes to user space; end is the position behind this send on the TCP stream. True if the kernel
 * had it. */
static __always_inline int backend_passes(struct server_slot *s, __u64 end)
{
	__u64 old = 0;

	for (int i = 0; i < CAS_TRIES; i++) {
		old = *(volatile __u64 *)&s->dir;
		if (__sync_bool_compare_and_swap(&s->dir, old, DIR_USER | (end & DIR_BYTES)))
			break;
	}
	count_counter(COUNTER_PASSED_SERVER);
	return !(old & DIR_USER);
}

/* Which way a send goes. */
enum response_way { WAY_SOCKET, WAY_DIRECT, WAY_NONE };

/*
 * Lane B: may a send of this size go straight into the application's receive queue? That queue is read before the one of TCP, so only
 * when the application has read all that was ever written to the client's socket: near has that as write_seq, and the two ends count the
 * same bytes. A recv() that began before the socket was in its map does not wake for redirected bytes: bytes that came
 * later by TCP prove that it has returned. Else it goes into the client's socket, if nothing that was redirected waits, see direct_unread().
 * Global, as direct_settled().
 */
__noinline int app_way(struct client_slot *c, __u32 size)
{
	struct tcp_sock *app, *near;
	__u32 read, queued;
	struct sock *sk;

	if (!apps_work || !bpf_rdonly_cast || !c)
		return WAY_SOCKET;
	app = socket_at(c->app_addr, c->app_cookie);
	near = socket_at(c->sk_addr, c->cookie);
	if (!app || !near)
		return WAY_SOCKET;
	sk = &app->inet_conn.icsk_inet.sk;
	if (sk->__sk_common.skc_state != TCP_ESTABLISHED || sk->sk_err || sk->sk_shutdown)
		return WAY_SOCKET;
	/* Since it was attached. */
	if (has_verdict(app))
		return WAY_SOCKET;
	read = *(volatile __u32 *)&app->copied_seq;
	if (read != near->write_seq)
		return WAY_SOCKET;
	if (!(c->app_flags & APP_AWAKE)) {
		if ((__s32)(read - c->app_after) <= 0)
			return WAY_SOCKET;
		c->app_flags |= APP_AWAKE;
	}
	queued = *(volatile int *)&sk->sk_backlog.rmem_alloc.counter;
	if (!queued) {
		c->app_chunks = 0;
		if (c->app_run >= APP_RUN_BYTES)
			return WAY_SOCKET;
	}
	if (queued + size > app_queue_bytes_max || c->app_chunks >= APP_CHUNKS_MAX || sk->sk_rcvlowat > 1)
		return queued ? WAY_NONE : WAY_SOCKET;
	c->app_chunks++;
	return WAY_DIRECT;
}

/*
 * May a send of this size go into the client's socket, or the application's? With too little room a retry would run this program twice. A
 * client that is gone would fail the send, and the backend would end for it when it may be another client's already.
 */
static __always_inline __u32 room_reason(struct client_slot *c, __u32 size, __u32 *direct)
{
	struct tcp_sock *tp = socket_at(c->sk_addr, c->cookie);
	__s32 missing;
	struct sock *sk;

	if (!bpf_rdonly_cast)
		return REASON_ROOM;
	if (!tp)
		return REASON_TARGET;
	sk = &tp->inet_conn.icsk_inet.sk;
	if (!takes_bytes(tp))
		return REASON_TARGET;
	missing = seq_missing(&c->tx_expect, &tp->write_seq);
	if (missing > 0)
		return REASON_PARTIAL_SEND;
	if (missing < 0)
		return REASON_BEHIND;
	if (apps_work) {
		int way = app_way(c, size);

		*direct = way == WAY_DIRECT;
		if (way != WAY_SOCKET)
			return way == WAY_DIRECT ? REASON_NONE : REASON_ROOM;
	}
	/* Twice: truesize of small fragments; slack: one page fragment and the next skb's head. */
	if (sk->sk_sndbuf - sk->sk_wmem_queued < (int)(2 * size + 16384))
		return REASON_ROOM;
	return REASON_NONE;
}

/* Known 0 without lane B, which removes the branches. */
static __always_inline __u32 sent_direct(struct server_slot *s)
{
	return apps_work ? *(volatile __u32 *)&s->direct : 0;
}

/* Notes from where a response goes straight to the application: before the commit, which may give the client to another server. Returns 0 for such a
 * one, else all ones. Without branches, each of which would double the verifier's paths through the commit. */
static __always_inline __u32 note_direct(struct client_slot *c, struct server_slot *s, __u32 server, __u32 run,
					 __u32 size, __u32 rfq)
{
	__u64 mask = 0;

	if (!apps_work)
		return ~0u;
	c->app_run = (c->app_run + size) & -is_zero(rfq);
	mask -= sent_direct(s);
	barrier_var(mask);
	c->last_server = (c->last_server & ~mask) | (server & mask);
	c->last_run = (c->last_run & ~mask) | (run & mask);
	c->last_cookie = (c->last_cookie & ~mask) | (s->cookie & mask);
	c->last_addr = (c->last_addr & ~mask) | (s->sk_addr & mask);
	return ~(__u32)mask;
}

static __always_inline __u32 forward_send(struct sk_msg_md *msg, struct server_slot *s, __u32 server, __u32 run,
					  struct response_commit *done, __u32 *client)
{
	struct response_scan scan = { .source = msg, .w = s->resp, .end = msg->size, .error_at = msg->size };
	struct client_slot *c = linked_client(s, client);
	struct tap_last *tap = NULL;
	__u32 reason, position, direct = 0;
	__u64 tells = 0;

	if (!c) {
		drop_from_idle(s);
		return REASON_NO_CLIENT;
	}
	scan.pinned = is_pinned(c);
	if (response_run_bytes_max && s->run_bytes + (__u64)msg->size > response_run_bytes_max)
		return REASON_RESPONSE_RUN;
	/* Another server's last response must be there first. */
	if (apps_work && c->last_addr != s->sk_addr && !direct_settled(c))
		return REASON_BEHIND;
	reason = room_reason(c, msg->size, &direct);
	/* Kept where the verifier does not know it: it would walk all that follows once for each. */
	s->direct = direct;
	if (reason)
		return reason;
	if (msg->size > MSG_BYTES_MAX)
		return REASON_GATHER;
	if ((__u8 *)msg->data + msg->size > (__u8 *)msg->data_end &&
	    bpf_msg_pull_data(msg, 0, msg->size, 0))
		return REASON_GATHER;
	scan_response_msg(&scan);
	if (scan.reason)
		return scan.reason;
	position = s->run_bytes;
	if (tap_wanted(c) && !c->tap_lost) {
		tells = tap_last_msg(msg, *client, TAP_RESPONSE, msg->size, &tap);
		if (!tells && tap_without(c))
			return REASON_MIRROR;
	}
	commit_response(&scan, s, server, c, msg->size, note_direct(c, s, server, run, msg->size, scan.rfq), done);
	tap_response(tells, tap, &done->tap, position, !done->reason, done->released);
	return done->reason;
}

/* Lane B: into the application's receive queue. If it has closed its socket since app_way(), into the client's, whose
 * other end nobody reads any more: the backend's send() must not fail for that. */
static __always_inline int redirect_direct(struct sk_msg_md *msg, __u32 client)
{
	struct client_slot *c = bpf_map_lookup_elem(&clients, &client);
	__u64 cookie;

	if (!c)
		return SK_DROP;
	cookie = c->app_cookie;
	if (bpf_msg_redirect_hash(msg, &app_socks, &cookie, BPF_F_INGRESS) == SK_PASS)
		return SK_PASS;
	__sync_fetch_and_add(&c->tx_expect, msg->size);
	return bpf_msg_redirect_map(msg, &client_socks, client, 0);
}

/* Whether a slot still is the client's with this cookie. */
static __always_inline int is_client(__u32 client, __u64 cookie)
{
	struct client_slot *c = bpf_map_lookup_elem(&clients, &client);

	return c && c->cookie == cookie;
}

/* Notes whose answer goes behind a request, and where it ends. */
static __always_inline void note_answer(struct server_slot *s, __u32 client, __u32 direct)
{
	struct client_slot *c = bpf_map_lookup_elem(&clients, &client);

	if (!c)
		return;
	s->owed_client = client;
	s->owed_seq = c->tx_expect;
	s->told_cookie = c->cookie;
	*(volatile __u64 *)&s->owed_cookie = direct ? 0 : c->cookie;
}

/*
 * Has the last answer behind which a request was brought along come into its client's socket only in part, for want of memory? Then this send is the rest of
 * it, or all of it again, and not for whom the server is linked to. Global, as direct_settled().
 */
__noinline int answer_missing(struct server_slot *s)
{
	struct client_slot *c;
	struct tcp_sock *tp;
	__u32 client;

	if (!s || !s->owed_cookie)
		return 0;
	client = s->owed_client;
	c = bpf_map_lookup_elem(&clients, &client);
	tp = c ? socket_at(c->sk_addr, s->owed_cookie) : NULL;
	if (tp && (__s32)(s->owed_seq - *(volatile __u32 *)&tp->write_seq) > 0)
		return 1;
	*(volatile __u64 *)&s->owed_cookie = 0;
	return 0;
}

/*
 * Lanes A and B. Called inside the backend's own send(), before the bytes enter its TCP socket. After a send that the
 * socket took only in part it is called again for the rest, so while user space owns the direction the position
 * is computed from the socket's own sequence numbers and not summed up.
 */
SEC("sk_msg")
int response_msg(struct sk_msg_md *msg)
{
	struct bpf_sock *sk = msg->sk;
	struct response_commit done = {};
	__u32 *found, index, reason, begun, client = 0, direct = 0, size, brings;
	struct server_slot *s;
	struct tcp_sock *tp;
	int verdict = SK_PASS, handed;
	__u64 end;

	if (!sk)
		goto unknown;
	found = bpf_sk_storage_get(&backend_slot, sk, 0, 0);
	if (!found)
		goto unknown;
	index = *found;
	s = bpf_map_lookup_elem(&servers, &index);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!s || !tp)
		goto unknown;

	/* The answer behind a request that went first. All was decided then; the kernel keeps the number of bytes that was said last. */
	brings = kept_bytes_max ? *(volatile __u32 *)&s->brings : 0;
	if (brings) {
		client = brings & ~(BRINGS_ANSWER | BRINGS_DIRECT);
		*(volatile __u32 *)&s->brings = 0;
		bpf_msg_apply_bytes(msg, 0);
		if (!is_client(client, s->told_cookie)) {
			/* It has left since, and its place is another's. */
			count(REASON_TARGET);
			verdict = SK_DROP;
			goto out;
		}
		if (apps_work && brings & BRINGS_DIRECT)
			verdict = redirect_direct(msg, client);
		else
			verdict = bpf_msg_redirect_map(msg, &client_socks, client, 0);
		if (verdict != SK_PASS)
			count(REASON_TARGET);
		goto out;
	}

	/* Atomic for its fence: user space sets DIR_USER, then reads this; one of the two sees the other. */
	begun = __sync_fetch_and_add(&s->runs_begin, 1);
	barrier_var(begun);
	end = bytes_enqueued(tp) + msg->size; /* sendmsg() holds the lock */
	if (kept_bytes_max && answer_missing(s)) {
		if (backend_passes(s, end))
			server_up(s, index, REASON_PARTIAL_SEND);
		verdict = SK_DROP;
		goto out;
	}
	if (*(volatile __u64 *)&s->dir & DIR_USER) {
		/* User space may just be giving the direction back: then it must hear of this. */
		if (backend_passes(s, end)) {
			drop_from_idle(s);
			server_up(s, index, REASON_NO_CLIENT);
		}
		goto out;
	}
	reason = forward_send(msg, s, index, begun + 1, &done, &client);
	if (reason) {
		backend_passes(s, end);
		server_up(s, index, reason);
		if (reason == REASON_PARTIAL_SEND)
			verdict = SK_DROP;
		goto out;
	}
	direct = sent_direct(s);
	size = msg->size;
	count_counter(direct ? COUNTER_RESPONSES_B : COUNTER_RESPONSES_A);
	if (done.xacts)
		add_counter(direct ? COUNTER_XACTS_B : COUNTER_XACTS_A, done.xacts);
	handed = 0;
	if (done.released) {
		*(volatile __u64 *)&s->answered = SENT_KNOWN | done.generation << SENT_GEN_SHIFT | client;
		handed = kept_bytes_max ? hand_on(msg, s, index) : 0;
	}
	if (handed) {
		*(volatile __u64 *)&s->fwd += size;
		count_counter(COUNTER_RELEASES);
		if (handed < 0) { /* no memory: the backend ends, and both clients with it */
			count(REASON_GATHER);
			verdict = SK_DROP;
			goto out;
		}
		note_answer(s, client, direct);
		/* The run ends when the rest has been told its way: until then the next request may not be where it can be read. */
		*(volatile __u32 *)&s->brings = BRINGS_ANSWER | (direct ? BRINGS_DIRECT : 0) | client;
		return bpf_msg_redirect_map(msg, &backend_socks, index, BPF_F_INGRESS);
	}
	if (direct)
		verdict = redirect_direct(msg, client);
	else
		verdict = bpf_msg_redirect_map(msg, &client_socks, client, 0);
	stall();
	if (verdict != SK_PASS)
		count(REASON_TARGET);
	if (done.hold)
		server_up(s, index, done.hold);
	*(volatile __u64 *)&s->fwd += size;
	if (done.released)
		release_server(s);
out:
	stall();
	*(volatile __u32 *)&s->runs_end += 1;
	return verdict;
unknown:
	count(REASON_UNKNOWN);
	return SK_PASS;
}

/*
 * What is attached instead of response_msg, which redirects into backends' sockets: a backend's socket keeps its program, a program its maps, and that
 * map its sockets, so a backend that is busy when the pooler dies would keep them all. The kernel empties a map of programs when no process
 * has it any more; what is sent then goes its own way.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__array(values, int(void *));
} response_programs SEC(".maps") = {
	.values = { [0] = (void *)&response_msg },
};

SEC("sk_msg")
int response_entry(struct sk_msg_md *msg)
{
	bpf_tail_call(msg, &response_programs, 0);
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
