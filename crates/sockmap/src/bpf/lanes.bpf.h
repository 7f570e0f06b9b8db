/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Maps, settings and small operations that all lane programs share.
 *
 * Lock-free throughout: every function here is a few atomic instructions on a slot, and may run on any CPU at
 * the same time as user space does its half of the protocol described in docs/lanes.md.
 */
#ifndef LANES_BPF_H
#define LANES_BPF_H

#include "lanes.h"

/* Settings, written by user space between open and load. */
const volatile __u32 lanes_abi = LANES_ABI;
const volatile __u32 request_budget_bytes = 256 << 10;
const volatile __u32 response_queue_bytes_max = 256 << 10;
const volatile __u32 response_run_bytes_max = 0; /* 0: no limit */
const volatile __u32 message_length_max = 1 << 30;
/*
 * The verifier is older than kernel commit ab5cfac139ab (Linux 6.7; in stable 6.6.15): it walks the function of a loop once, takes what it left for known and removes the code for
 * all else; and it does not learn from a comparison that a number is not 0. What helps it would make newer ones walk for ever.
 */
const volatile __u32 old_verifier = 0;

/*
 * For tests: at each stall() one pass in STALL_ONE_IN stops for so many empty rounds of bpf_loop(), so that what other processors may do in between is
 * done. 0, as it is in service: the verifier takes the calls out.
 */
const volatile __u32 stall_rounds = 0;
#define STALL_ONE_IN 16

/* Lane B: applications' own sockets are in app_socks, perhaps. */
const volatile __u32 apps_work = 0;
/* Bytes and chunks that may wait in an application's socket; each chunk costs the kernel a structure of 712 bytes beside them. */
const volatile __u32 app_queue_bytes_max = 256 << 10;
#define APP_CHUNKS_MAX 256
/* From so many bytes of an answer on, the rest goes by TCP as soon as the application has read what waits. */
#define APP_RUN_BYTES (64u << 10)

/* Requests of up to so many bytes are kept in the kernel while no server is idle; 0: none. */
const volatile __u32 kept_bytes_max = 0;
/* Places of a queue that are looked at for one that is still waiting: the others have been taken to user space. */
#define QUEUE_TRIES 16

/* Reads of the target's queue start after so many bytes of one link: a short answer cannot overrun it,
 * because a link starts only when the queue is empty. */
#define GAUGE_AFTER_BYTES (32u << 10)
#define PENDING_MAX 4096u
/* Walks per chunk: 64 KiB hold at most 13,107 messages of five bytes; of a longer chunk with more, user space takes care. */
#define MESSAGES_MAX 16384
/* A compare-and-swap loses only to the program of the other direction or to user space; more tries cost the verifier
 * more than they save. */
#define CAS_TRIES 3

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct client_slot);
} clients SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct server_slot);
} servers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pool_slot);
} pools SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lane_control);
} control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct kept_request);
} kept_requests SEC(".maps");

/* Accepted client sockets, key = client slot; request_skb is attached. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} client_socks SEC(".maps");

/* Lane D: the pooler's connected server sockets, key = server slot; response_skb is attached. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} server_socks SEC(".maps");

/* Lane A: the backends' own sockets, key = server slot; response_msg is attached. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} backend_socks SEC(".maps");

/* Lane B: the applications' own sockets, key = cookie; request_msg is attached. Not the client's slot: an application may keep its socket long after
 * the pooler has closed the other end, and then unread bytes must stay in it. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u64);
} app_socks SEC(".maps");

/* Socket cookie to slot: sk_skb programs have no socket storage. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u32);
} client_cookie SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u32);
} server_cookie SEC(".maps");

/* Backend socket to slot: sk_msg programs have no cookie helper. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} backend_slot SEC(".maps");

/* Likewise, application's socket to the slot that its client had when it was attached. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} app_slot SEC(".maps");

/* Prepared statements. User space changes the entries of a client or server only while it owns it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct client_statement);
	__type(value, __u32);
} client_statements SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct server_statement);
	__type(value, struct statement_name);
} server_statements SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_NR + COUNTER_NR);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

static __always_inline struct lane_control *lanes_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

/* A length that is 1 to max already, a power of two, in a form from which an old verifier sees that. */
static __always_inline __u32 seen_1_to(__u32 max, __u32 n)
{
	if (!old_verifier)
		return n;
	n--;
	barrier_var(n);
	n = (n & (max - 1)) + 1;
	barrier_var(n);
	return n;
}

/* A 0 that an old verifier does not know, to be or-ed to what a loop found. */
static __always_inline __u32 unknown_zero(void)
{
	struct lane_control *ctl;

	if (!old_verifier)
		return 0;
	ctl = lanes_control();
	return ctl ? *(volatile __u64 *)&ctl->zero : 0;
}

/* 1 for 0, else 0, of a number below 2^31; without a branch, whose two paths the verifier would walk to their ends. */
static __always_inline __u32 is_zero(__u32 n)
{
	barrier_var(n);
	return (n - 1) >> 31;
}

static long stall_step(__u32 i, void *context)
{
	return 0;
}

/* Global, so that the verifier walks it once and not at each place. */
__noinline int stall_sometimes(void)
{
	if (bpf_get_prandom_u32() % STALL_ONE_IN)
		return 0;
	return bpf_loop(stall_rounds, stall_step, NULL, 0);
}

/* Between two steps that others see one without the other. See stall_rounds. */
static __always_inline void stall(void)
{
	if (stall_rounds)
		stall_sometimes();
}

static __always_inline void count(__u32 index)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &index);

	if (value)
		*value += 1;
}

/* Atomic: a program that runs in a system call can be interrupted by one in softirq on its CPU, and transactions are to add up exactly. */
static __always_inline void add_counter(enum lane_counter counter, __u32 amount)
{
	__u32 index = REASON_NR + counter;
	__u64 *value = bpf_map_lookup_elem(&counters, &index);

	if (value)
		__sync_fetch_and_add(value, amount);
}

static __always_inline void count_counter(enum lane_counter counter)
{
	count(REASON_NR + counter);
}

static __noinline int post_event(__u32 kind, __u32 slot, __u32 reason)
{
	struct lane_event *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);

	if (!event) {
		struct lane_control *c = lanes_control();

		count_counter(COUNTER_EVENTS_LOST);
		if (c)
			__sync_fetch_and_add(&c->events_lost, 1);
		return -1;
	}
	event->kind = kind;
	event->slot = slot;
	event->reason = reason;
	event->pad = 0;
	bpf_ringbuf_submit(event, 0);
	count_counter(COUNTER_EVENTS);
	return 0;
}

/* The request direction goes to user space; the chunk at hand is passed with it. */
static __always_inline void client_up(struct client_slot *c, __u32 index, __u32 reason)
{
	c->reason = reason;
	__sync_fetch_and_or(&c->req_dir, DIR_USER);
	count(reason);
	post_event(EVENT_CLIENT_UP, index, reason);
}

static __always_inline void server_up(struct server_slot *s, __u32 index, __u32 reason)
{
	s->reason = reason;
	__sync_fetch_and_or(&s->dir, DIR_USER);
	count(reason);
	post_event(EVENT_SERVER_UP, index, reason);
}

static __always_inline __u32 link_pending(__u64 link)
{
	return link & LINK_PENDING_MASK;
}

static __always_inline __u32 link_server(__u64 link)
{
	return (link & LINK_SERVER_MASK) >> LINK_SERVER_SHIFT;
}

/* Bytes that were ever enqueued for sending, up to a constant. Only for a socket whose lock the caller's context
 * holds: acknowledgements change snd_una and bytes_acked one after the other. */
static __always_inline __u64 bytes_enqueued(struct tcp_sock *tp)
{
	return tp->bytes_acked + (__u32)(tp->write_seq - tp->snd_una);
}

/* How far a sequence number is behind what is expected of it; one load of it, so never a torn view. */
static __always_inline __s32 seq_missing(const __u64 *expect, const __u32 *seq)
{
	return (__s32)((__u32)*(const volatile __u64 *)expect - *(const volatile __u32 *)seq);
}

/* The socket at an address that user space has looked up, if it still is the one with this cookie. */
static __always_inline struct tcp_sock *socket_at(__u64 address, __u64 cookie)
{
	struct tcp_sock *tp;

	if (!bpf_rdonly_cast || !address)
		return NULL;
	tp = bpf_rdonly_cast((void *)(unsigned long)address, bpf_core_type_id_kernel(struct tcp_sock));
	if ((__u64)tp->inet_conn.icsk_inet.sk.__sk_common.skc_cookie.counter != cookie)
		return NULL;
	return tp;
}

/* Bytes that bpf_skb_adjust_room() takes at most, and steps for the longest segment: 512 KiB are seen on loopback, where what waits is merged. */
#define CUT_BYTES 0xfffu
#define CUT_STEPS 1024

struct cut {
	struct __sk_buff *skb;
	__u32 n;
	__u32 failed;
};

static long cut_step(__u32 i, void *context)
{
	struct cut *c = context;
	__u32 off = i * CUT_BYTES, n = c->n - off;

	if (c->n <= off)
		return 1;
	if (n > CUT_BYTES)
		n = CUT_BYTES;
	if (bpf_skb_adjust_room(c->skb, -(__s32)n, 0, 0)) {
		c->failed = 1;
		return 1;
	}
	return 0;
}

/* Takes n bytes, fewer than the segment has, off its head. Global, so that the verifier walks the loop once. */
__noinline int cut_head(struct __sk_buff *skb, __u32 n)
{
	struct cut c = { .skb = skb, .n = n };

	if (n > CUT_BYTES * CUT_STEPS)
		return -1;
	bpf_loop(CUT_STEPS, cut_step, &c, 0);
	return c.failed | unknown_zero();
}

/*
 * A retransmission can bring, ahead of what is new, bytes that have come before. recv() skips those by their sequence numbers, but tcp_read_skb(),
 * which hands segments to a verdict, does not: program, target and user space would all take them for new ones. So they are cut off first,
 * whoever gets the segment; the kernel then adds the length that is left to copied_seq, which is right. Returns -1 for a segment with nothing new, and for all
 * that follows one that could not be cut: a connection that stands still meets a timeout, one with a hole would lie.
 */
static __always_inline int cut_overlap(struct __sk_buff *skb, struct tcp_sock *tp, __u64 *next_seq)
{
	__u32 at = bpf_core_field_offset(struct sk_buff, cb) + bpf_core_field_offset(struct tcp_skb_cb, seq);
	__u32 next = *next_seq;
	__s32 overlap;
	__u32 seq;

	if (*next_seq & NEXT_SEQ_LOST)
		return -1;
	if (bpf_probe_read_kernel(&seq, sizeof(seq), (void *)skb + at))
		return 0;
	if (!*next_seq) /* the first one here: user space had the socket before */
		next = tp->copied_seq;
	overlap = next - seq;
	if (overlap > 0) {
		count_counter(COUNTER_OVERLAPS);
		if ((__u32)overlap >= skb->len)
			return -1;
		if (cut_head(skb, overlap)) {
			*next_seq |= NEXT_SEQ_LOST;
			return -1;
		}
		seq = next;
	}
	*next_seq = NEXT_SEQ_KNOWN | (__u32)(seq + skb->len);
	return 0;
}

/*
 * Lane A: has the backend read all that user space wrote to it? tcp_bpf_recvmsg() serves redirected bytes before those
 * of the TCP receive queue, so until then a redirected request would overtake one that was written before it.
 */
static __always_inline int backend_caught_up(struct server_slot *s)
{
	struct tcp_sock *tp = socket_at(s->sk_addr, s->cookie);

	return tp && !seq_missing(&s->tx_expect, &tp->copied_seq);
}

/* May bytes be sent to this socket? One that has been reset takes none and fails the send. */
static __always_inline int takes_bytes(struct tcp_sock *tp)
{
	struct sock *sk = &tp->inet_conn.icsk_inet.sk;
	__u8 state = sk->__sk_common.skc_state;

	return (state == TCP_ESTABLISHED || state == TCP_CLOSE_WAIT) && !sk->sk_err &&
	       !(sk->sk_shutdown & SEND_SHUTDOWN);
}

/* Address of the psock of a socket; 0 if that is in no map. */
static __always_inline unsigned long psock_address(struct tcp_sock *tp)
{
	return (unsigned long)tp->inet_conn.icsk_inet.sk.sk_user_data & PSOCK_POINTER_MASK;
}

/* The psock of a socket in a map. */
static __always_inline struct sk_psock *psock_of(struct tcp_sock *tp)
{
	return bpf_rdonly_cast((void *)psock_address(tp), bpf_core_type_id_kernel(struct sk_psock));
}

/*
 * Does a program read what comes to this socket, as another pooler's does at the socket to its server? What is redirected into it would
 * pass that program by, which counts the bytes, and its owner would wait for them for ever.
 */
static __always_inline int has_verdict(struct tcp_sock *tp)
{
	struct sk_psock *psock = psock_of(tp);

	return psock->progs.skb_verdict || psock->progs.stream_verdict;
}

/* Has the application of lane B closed its socket, or has it none? close() takes it out of its map first, and then ends the connection. */
static __always_inline int app_gone(struct client_slot *c)
{
	struct tcp_sock *app = socket_at(c->app_addr, c->app_cookie);

	return !app || !psock_address(app) ||
	       app->inet_conn.icsk_inet.sk.__sk_common.skc_state != TCP_ESTABLISHED;
}

/*
 * Lanes A and B release a server before the kernel puts its answer into the client's socket, or the application's. If that is gone in between,
 * the backend's send() has failed and PostgreSQL is about to end: nobody may be linked to it any more. A client that has been linked again since had
 * all its answers.
 *
 * Lane A leaves a trace, the bytes that its socket lacks. Lane B leaves none, so there it is a doubt: the answer went to an application that has closed its socket
 * since, and has not said anything after that send was over, as one that takes its leave with Terminate has. Global, as direct_settled().
 */
__noinline int answer_lost(struct server_slot *s)
{
	struct client_slot *c;
	struct tcp_sock *tp;
	__u32 client;
	__u64 sent, link;

	if (!bpf_rdonly_cast || !s)
		return 0;
	sent = *(volatile __u64 *)&s->answered;
	client = sent;
	if (!sent)
		return 0;
	c = bpf_map_lookup_elem(&clients, &client);
	if (!c || !c->in_use)
		return 0;
	link = *(volatile __u64 *)&c->link >> LINK_GEN_SHIFT;
	if ((link ^ sent >> SENT_GEN_SHIFT) & SENT_GEN_MASK)
		return 0;
	tp = socket_at(c->sk_addr, c->cookie);
	if (tp && !takes_bytes(tp) && seq_missing(&c->tx_expect, &tp->write_seq) > 0)
		return 1;
	if (!apps_work || !c->last_addr || c->last_addr != s->sk_addr || c->last_run != *(volatile __u32 *)&s->runs_begin)
		return 0;
	if (*(volatile __u64 *)&c->clear == (CLEAR_KNOWN | link) || bpf_ktime_get_ns() - s->active_ns > DOUBT_NS)
		return 0;
	return app_gone(c);
}

/*
 * Lane B: is the last response that went straight to the application in its queue? The kernel puts it there after the program has
 * returned, and no sequence number tells. But a send() holds a reference to the psock of its socket from before the program until the
 * bytes are where they belong; and a backend sends one after the other. Global, so that the verifier walks it once and not on each path.
 */
__noinline int direct_settled(struct client_slot *c)
{
	struct server_slot *s;
	struct tcp_sock *tp;
	__u32 index;

	if (!apps_work || !bpf_rdonly_cast || !c)
		return 1;
	index = c->last_server;
	tp = socket_at(c->last_addr, c->last_cookie);
	if (!tp) /* never, or the backend has closed its socket */
		return 1;
	if (*(volatile int *)&psock_of(tp)->refcnt.refs.counter <= 1)
		return 1;
	s = bpf_map_lookup_elem(&servers, &index);
	return s && s->cookie == c->last_cookie && *(volatile __u32 *)&s->runs_begin != c->last_run;
}

/*
 * Bytes that went straight to the application and that it has not read. While there are any, nothing may be written to the client's
 * socket: a recv() returns redirected bytes alone, and who waits for edges (tokio) takes a short read for an empty socket and would never hear of
 * what lies in the TCP receive queue. The reverse cannot be: nothing is redirected before that queue is read. Global, as direct_settled().
 */
__noinline int direct_unread(struct client_slot *c)
{
	struct tcp_sock *app, *near;

	if (!apps_work || !bpf_rdonly_cast || !c)
		return 0;
	app = socket_at(c->app_addr, c->app_cookie);
	near = socket_at(c->sk_addr, c->cookie);
	if (!app || !near || *(volatile __u32 *)&app->copied_seq != near->write_seq)
		return 0;
	return *(volatile int *)&app->inet_conn.icsk_inet.sk.sk_backlog.rmem_alloc.counter;
}

/* Whether requests are kept in a pool. */
static __always_inline int queue_waits(struct pool_slot *p)
{
	return kept_bytes_max && *(volatile __u64 *)&p->queue_begin != *(volatile __u64 *)&p->queue_end;
}

/* User space is to look at a pool: servers are idle and somebody waits, or the pool is closed. */
static __always_inline void announce(struct pool_slot *p, __u32 pool)
{
	if (!__sync_lock_test_and_set(&p->announced, 1) && post_event(EVENT_POOL_IDLE, pool, REASON_NONE))
		__sync_lock_test_and_set(&p->announced, 0);
}

/* Returns a server to the idle set of its pool. The caller owns it and has cleared its peer. */
static __always_inline void push_idle(struct server_slot *s)
{
	__u32 key = s->pool, ordinal = s->ordinal;
	struct pool_slot *p = bpf_map_lookup_elem(&pools, &key);

	if (!p || ordinal >= POOL_ORDINALS_MAX)
		return;
	stall();
	__sync_fetch_and_or(&p->idle[ordinal / 64], 1ULL << (ordinal % 64));
	stall();
	/* The fence of the atomic orders this read behind the push. User space raises waiters before it looks
	 * for an idle server: one of the two sees the other. */
	if (*(volatile __u32 *)&p->waiters || *(volatile __u32 *)&p->flags || queue_waits(p))
		announce(p, key);
}

#endif /* LANES_BPF_H */
