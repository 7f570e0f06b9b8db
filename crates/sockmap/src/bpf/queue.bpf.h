/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The queue of a pool: requests for which no server is idle.
 *
 * A program cannot keep a segment, but it can copy one and drop it. Who brings the copy to a server is the backend's own send(): the program that
 * sees it end a transaction puts the next request in front of the answer, has the kernel redirect so many bytes into that backend's own receive queue, and is
 * called again for the rest, which is the answer. When send() returns the next request is there, and nobody was woken for it.
 *
 * Invariants:
 * - Places are filled in the order of their numbers and emptied in that order, by whoever changes the word of the place from taken to 0; what is
 *   written about a client counts only while its link word says LINK_KEPT and its request names that place.
 * - A server goes to the idle set before the queue is looked at, and a request into the queue before the idle set is: one of the two sees the other
 *   and has user space look (announce()).
 * - While clients wait in user space, whose requests came before, nothing is handed on.
 */
#ifndef QUEUE_BPF_H
#define QUEUE_BPF_H

#include "lanes.bpf.h"
#include "request.bpf.h"

/* Room for a place at the end of a queue: its number, or -1. */
static __always_inline __s64 queue_room(struct pool_slot *p)
{
	for (int i = 0; i < CAS_TRIES; i++) {
		__u64 end = *(volatile __u64 *)&p->queue_end;

		if (end - *(volatile __u64 *)&p->queue_begin >= QUEUE_PLACES)
			return -1;
		if (__sync_bool_compare_and_swap(&p->queue_end, end, end + 1))
			return end;
	}
	return -1;
}

static __always_inline __u64 queue_word(__u64 number, __u32 client)
{
	return QUEUE_TAKEN | (number & QUEUE_NUMBER_MASK) << QUEUE_NUMBER_SHIFT | client;
}

/* Has user space look at a queue that it may have looked at too early. The caller's atomic instruction before is the fence. Global, so that the verifier walks it once. */
__noinline int look_at_queue(struct pool_slot *p, __u32 pool)
{
	__u64 idle = 0;

	if (!p || !queue_waits(p))
		return 0;
	for (__u32 i = 0; i < POOL_WORDS; i++)
		idle |= *(volatile __u64 *)&p->idle[i];
	if (idle || *(volatile __u32 *)&p->flags || !*(volatile __u32 *)&p->keeps)
		announce(p, pool);
	return 0;
}

/* What keep_request() says of a request that it keeps. */
#define KEPT REASON_NR

/* What it needs to know beside: ReadyForQuery that the request asks for, KEEP_*, and why there is no link. */
#define KEEP_SYNCS 0xffffu
#define KEEP_EXTENDED (1u << 16)
#define KEEP_UNNAMED (1u << 17)
#define KEEP_OPEN (1u << 18)
#define KEEP_REASON_SHIFT 19
#define KEEP(reason, scan, wanted)                                                                               \
	((scan)->syncs | (__u32)(scan)->extended << 16 | !!((scan)->unnamed & UNNAMED_LINK) << 17 |              \
	 !!((wanted) & LINK_OPEN) << 18 | (reason) << KEEP_REASON_SHIFT)

/*
 * Keeps the request at hand, if it is whole and of a client that has had all its answers and whom no mirror follows. Else returns the reason for which user
 * space must have it, which is in `asks`. Global, so that the verifier walks it once.
 */
__noinline int keep_request(struct __sk_buff *skb, struct client_slot *c, struct statement_uses *uses, __u32 client,
			    __u32 asks)
{
	__u32 n = skb->len, pool, reason = asks >> KEEP_REASON_SHIFT;
	struct kept_request *k;
	struct tcp_sock *tp;
	struct pool_slot *p;
	__u64 old, new;
	__s64 number;

	if (!c || !uses || (reason != REASON_NO_SERVER && reason != REASON_WAITERS) || !(asks & KEEP_SYNCS) || asks & KEEP_OPEN)
		return reason;
	tp = socket_at(c->sk_addr, c->cookie);
	if (!tp || c->tap || seq_missing(&c->tx_expect, &tp->write_seq) || (apps_work && !direct_settled(c)))
		return reason;
	pool = c->pool;
	p = bpf_map_lookup_elem(&pools, &pool);
	k = bpf_map_lookup_elem(&kept_requests, &client);
	if (!p || !k || !*(volatile __u32 *)&p->keeps || *(volatile __u32 *)&p->flags)
		return reason;
	barrier_var(n);
	if (n < 1 || n > KEPT_BYTES || n > kept_bytes_max)
		return reason;
	old = *(volatile __u64 *)&c->link;
	if (old & (LINK_LINKED | LINK_HELD | LINK_PINNED | LINK_KEPT))
		return reason;
	if (bpf_skb_load_bytes(skb, 0, k->words, seen_1_to(KEPT_BYTES, n)))
		return reason;
	number = queue_room(p);
	if (number < 0)
		return reason;
	k->place = number;
	k->at_ns = c->active_ns;
	k->length = n;
	k->syncs = asks & KEEP_SYNCS;
	k->extended = !!(asks & KEEP_EXTENDED);
	k->uses = *uses;
	/* Of the link to come. Nobody looks at them before. */
	c->flags = CLI_HANDED | (asks & KEEP_UNNAMED ? CLI_UNNAMED : 0) | (uses->count ? CLI_NAMED : 0);
	c->cycle_bytes = n;
	new = (old & ~((1ULL << LINK_GEN_SHIFT) - 1)) + (1ULL << LINK_GEN_SHIFT);
	new |= LINK_KEPT;
	stall();
	/* From this word on the request is the queue's, or user space's. */
	if (!__sync_bool_compare_and_swap(&c->link, old, new)) {
		__sync_lock_test_and_set(&p->place[number & (QUEUE_PLACES - 1)], queue_word(number, QUEUE_NOBODY));
		announce(p, pool); /* somebody may have given up at this place */
		return REASON_LINK_RACE;
	}
	stall();
	__sync_lock_test_and_set(&p->place[number & (QUEUE_PLACES - 1)], queue_word(number, client));
	stall();
	look_at_queue(p, pool);
	count_counter(COUNTER_KEPT);
	return KEPT;
}

struct kept_copy {
	struct sk_msg_md *msg;
	const __u64 *words;
	__u32 length;
	__u32 stored;
};

static long kept_copy_step(__u32 i, void *context)
{
	struct kept_copy *copy = context;
	__u8 *to = (__u8 *)copy->msg->data + i * 8;
	__u64 word;

	if (i >= KEPT_BYTES / 8)
		return 1;
	word = copy->words[i];
	if (i * 8 + 8 <= copy->length) {
		if (to + 8 > (__u8 *)copy->msg->data_end)
			return 1;
		*(__u64 *)to = word;
		copy->stored += 8;
		return 0;
	}
	for (__u32 j = 0; j < 7; j++) {
		if (i * 8 + j >= copy->length || to + j + 1 > (__u8 *)copy->msg->data_end)
			return 1;
		to[j] = word;
		word >>= 8;
		copy->stored++;
	}
	return 1;
}

struct queue_search {
	struct server_slot *server;
	struct pool_slot *pool;
	struct kept_request *request;
	__u64 old; /* the link word that said that it is kept, and the one that links it */
	__u64 new;
	__u32 pool_index;
	__u32 server_index;
	__u32 client;
	__u32 found;
};

/* Looks at the first place of a queue; returns 1 when the search is over. */
static long queue_step(__u32 i, void *context)
{
	struct queue_search *f = context;
	__u64 begin = *(volatile __u64 *)&f->pool->queue_begin, word, old = 0, new;
	__u32 client, reason = REASON_NONE, is_kept = 0;
	struct server_slot *s = f->server;
	struct kept_request *k;
	struct client_slot *c;

	if (begin == *(volatile __u64 *)&f->pool->queue_end)
		return 1;
	word = *(volatile __u64 *)&f->pool->place[begin & (QUEUE_PLACES - 1)];
	client = word;
	/* About to be written: who writes it looks at the idle set afterwards. Or another one was faster. */
	if (word != queue_word(begin, client))
		return begin == *(volatile __u64 *)&f->pool->queue_begin;
	c = bpf_map_lookup_elem(&clients, &client);
	k = bpf_map_lookup_elem(&kept_requests, &client);
	if (c && k) {
		old = *(volatile __u64 *)&c->link;
		/* Of those who left a place their slots are others', perhaps of another pool, whose places have the same numbers. */
		is_kept = (old & (LINK_KEPT | LINK_LINKED | LINK_HELD)) == LINK_KEPT && k->place == begin &&
			  c->pool == f->pool_index;
		if (is_kept && c->fingerprint != s->fingerprint)
			reason = REASON_UNFIT;
		else if (is_kept && k->uses.count && !has_statements(&k->uses, f->server_index))
			reason = REASON_UNPREPARED;
	}
	if (!__sync_bool_compare_and_swap(&f->pool->place[begin & (QUEUE_PLACES - 1)], word, 0))
		return 0;
	stall();
	__sync_lock_test_and_set(&f->pool->queue_begin, begin + 1);
	/* Who has just looked at the place found it empty. */
	look_at_queue(f->pool, f->pool_index);
	if (!is_kept || !c || !k)
		return 0;
	if (reason) {
		client_up(c, client, reason);
		return 1;
	}
	new = (old & ~((1ULL << LINK_GEN_SHIFT) - 1)) + (1ULL << LINK_GEN_SHIFT);
	new |= LINK_LINKED | (k->extended ? LINK_EXTENDED : 0);
	new |= (__u64)f->server_index << LINK_SERVER_SHIFT | (k->syncs & LINK_PENDING_MASK);
	s->run_bytes = 0;
	*(volatile __u64 *)&s->peer = PEER_LINKED | client;
	stall();
	if (!__sync_bool_compare_and_swap(&c->link, old, new))
		return 0; /* user space has it */
	/* User space waits for the end of the run before it looks at these. */
	c->xact_start_ns = c->query_start_ns = c->active_ns = s->active_ns;
	k->handed = new >> LINK_GEN_SHIFT;
	__sync_fetch_and_add(&c->links, 1);
	k->waits++;
	k->wait_ns += s->active_ns - k->at_ns;
	f->old = old;
	f->new = new;
	f->client = client;
	f->request = k;
	f->found = 1;
	return 1;
}

/*
 * A backend has ended a transaction: links it to the client that waits longest, whose request it puts in front of the answer at hand. Returns the length
 * of that; 0 if there is none, or no memory, and the server is to be released; -1 if user space has taken over meanwhile what there is no memory for, and the send must fail.
 */
static __noinline int hand_on(struct sk_msg_md *msg, struct server_slot *s, __u32 server)
{
	__u32 key = s->pool, zero = unknown_zero();
	struct queue_search find = { .server = s, .server_index = server, .pool_index = key };
	struct client_slot *c;
	struct lane_control *ctl = lanes_control();
	struct kept_copy copy = { .msg = msg };

	find.pool = bpf_map_lookup_elem(&pools, &key);
	if (!find.pool || !ctl || ctl->off || !queue_waits(find.pool))
		return 0;
	if (*(volatile __u32 *)&find.pool->waiters || *(volatile __u32 *)&find.pool->flags ||
	    *(volatile __u64 *)&s->dir & DIR_USER || !backend_caught_up(s))
		return 0;
	bpf_loop(QUEUE_TRIES, queue_step, &find, 0);
	if (!(find.found | zero) || !find.request)
		return 0;
	copy.words = find.request->words;
	copy.length = find.request->length;
	if (copy.length < 1 || copy.length > KEPT_BYTES || bpf_msg_push_data(msg, 0, copy.length, 0)) {
		c = bpf_map_lookup_elem(&clients, &find.client);
		if (!c || !__sync_bool_compare_and_swap(&c->link, find.new, find.old))
			return -1;
		client_up(c, find.client, REASON_GATHER);
		return 0;
	}
	bpf_loop(KEPT_BYTES / 8, kept_copy_step, &copy, 0);
	if ((copy.stored | zero) != find.request->length)
		return -1;
	if (find.request->uses.count)
		rename_statements_msg(msg, &find.request->uses, server);
	bpf_msg_apply_bytes(msg, find.request->length);
	count_counter(COUNTER_LINKS);
	count_counter(COUNTER_HANDED_ON);
	return find.request->length;
}

#endif /* QUEUE_BPF_H */
