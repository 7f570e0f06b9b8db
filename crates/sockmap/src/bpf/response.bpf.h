/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The response half of a link: count ReadyForQuery, and at the end of a transaction give the server back.
 */
#ifndef RESPONSE_BPF_H
#define RESPONSE_BPF_H

#include "lanes.bpf.h"
#include "tap.bpf.h"

struct response_scan {
	void *source;
	struct wire_state w;
	__u32 off;
	__u32 end;
	__u32 rfq;	/* ReadyForQuery seen */
	__u32 reason;
	__u8 status;	/* of the last ReadyForQuery */
	__u8 trailing;	/* messages behind the last ReadyForQuery */
	__u8 copy_in;	/* CopyInResponse behind the last ReadyForQuery */
	__u8 done;
	__u8 pinned;	/* session pooling: statements and what comes unasked are the client's own */
	__u8 pad;
	__u16 idles;	/* of rfq: how many said that a transaction is over */
	__u32 error_at; /* where the head of an ErrorResponse ends; end if there is none. A position: a flag doubles the verifier's paths */
};

static __always_inline int status_code(__u8 status)
{
	return status == 'I' ? 0 : status == 'T' ? 1 : status == 'E' ? 2 : -1;
}

/* What commit_response() did, for the caller that forwards the chunk. */
struct response_commit {
	__u32 reason;	 /* not NONE: the chunk goes to user space, nothing was changed */
	__u32 hold;	 /* not NONE: forward the chunk, then the server goes to user space */
	__u32 released;
	__u32 xacts;	 /* transactions that ended here */
	__u64 generation; /* of the link word, if released */
	struct tap_commit tap;
};

/*
 * Commits a scanned chunk of len bytes from server s to client c. On success the bytes must be redirected, to the client's own
 * socket if written is all ones, else (0, lane B) to the application's.
 * Everything that belongs to the server is written before the compare-and-swap that releases it, and so is what is counted of the client: from then
 * on its counters are read as final, and other links write to them.
 */
static __always_inline void commit_response(struct response_scan *scan, struct server_slot *s, __u32 server,
					    struct client_slot *c, __u32 len, __u32 written,
					    struct response_commit *out)
{
	const struct wire_state before = s->resp;
	const __u64 asked = c->query_start_ns, began = c->xact_start_ns;
	int status = status_code(scan->status);
	__u64 now = 0, answered, over;

	out->reason = REASON_NONE;
	out->hold = REASON_NONE;
	out->released = 0;
	out->xacts = 0;
	/* "cached plan must not change result type" must not come again and again. */
	if (scan->error_at < scan->end && c->flags & CLI_NAMED) {
		out->reason = REASON_ERROR;
		return;
	}
	if (scan->rfq) {
		if (status < 0) {
			out->reason = REASON_RFQ_UNEXPECTED;
			return;
		}
		now = bpf_ktime_get_ns();
	}
	if (scan->rfq)
		s->active_ns = now;
	__sync_fetch_and_add(&c->tx_expect, len & written);
	s->run_bytes += len;
	for (int i = 0; i < CAS_TRIES; i++) {
		__u64 old = *(volatile __u64 *)&c->link, new = old - scan->rfq;
		__u32 flags = *(volatile __u32 *)&s->flags;
		__u32 pending = link_pending(old), idle;

		out->hold = REASON_NONE;
		out->released = 0;
		if (tap_works) {
			out->tap.link = old >> LINK_GEN_SHIFT;
			/* Before the swap: what is added to this link later makes it fail. */
			out->tap.requests = *(volatile __u64 *)&c->req_fwd;
		}
		if (!(old & LINK_LINKED) || link_server(old) != server) {
			out->reason = REASON_NO_CLIENT;
			break;
		}
		if (scan->rfq > pending) {
			out->reason = REASON_RFQ_UNEXPECTED;
			break;
		}
		if (scan->rfq) {
			new &= ~(LINK_STATUS_MASK | LINK_COPY);
			new |= (__u64)status << LINK_STATUS_SHIFT;
		}
		pending -= scan->rfq;
		if (scan->copy_in) {
			if (pending != 1 || (old & (LINK_EXTENDED | LINK_OPEN))) {
				out->reason = REASON_COPY_PIPELINE;
				break;
			}
			new |= LINK_COPY;
		}
		idle = scan->rfq && !pending && !status && !(old & LINK_OPEN);
		if (idle && !(old & LINK_PINNED)) {
			if (scan->trailing || !wire_boundary(&scan->w)) {
				out->reason = REASON_AFTER_RFQ;
				break;
			}
			if (old & LINK_HELD)
				out->hold = REASON_HELD;
			else if (flags & SRV_RETIRE)
				out->hold = REASON_RETIRE;
			else if (old & LINK_COPY) /* a COPY that failed may end before its last CopyData has gone to the server */
				out->hold = REASON_COPY_END;
			/* From this word on nothing is added: the next request is for another server, by way of user space. */
			if (out->hold)
				new |= LINK_HELD;
			else {
				new &= ~(LINK_LINKED | LINK_SERVER_MASK | LINK_EXTENDED);
				out->released = 1;
				out->generation = old >> LINK_GEN_SHIFT;
			}
		}
		/* As in user space: each of a pipeline, and the last of a link that is held for want of a release. */
		out->xacts = scan->idles;
		/* Masks, for a branch would double the verifier's paths through every try. */
		answered = (now - asked) & -(__u64)(is_zero(pending) & !!scan->rfq);
		over = (now - began) & -(__u64)!!out->xacts;
		if (scan->rfq)
			c->active_ns = now;
		c->resp_bytes += len;
		c->queries += scan->rfq;
		c->query_ns += answered;
		c->xacts += out->xacts;
		c->xact_ns += over;
		s->resp = scan->w;
		stall();
		if (__sync_bool_compare_and_swap(&c->link, old, new)) {
			stall();
			if (out->xacts && !out->released)
				c->xact_start_ns = now;
			return;
		}
		c->resp_bytes -= len;
		c->queries -= scan->rfq;
		c->query_ns -= answered;
		c->xacts -= out->xacts;
		c->xact_ns -= over;
		out->xacts = 0;
	}
	s->resp = before;
	if (!out->reason)
		out->reason = REASON_LINK_RACE;
	out->hold = REASON_NONE;
	out->released = 0;
	s->run_bytes -= len;
	__sync_fetch_and_sub(&c->tx_expect, len & written);
}

/* The server is nobody's: back to the idle set. */
static __always_inline void release_server(struct server_slot *s)
{
	*(volatile __u64 *)&s->peer = 0;
	push_idle(s);
	count_counter(COUNTER_RELEASES);
}

/* A server that speaks without a client must not be granted to one before user space has listened. True if it was in the set. */
static __always_inline int drop_from_idle(struct server_slot *s)
{
	__u32 key = s->pool, ordinal = s->ordinal;
	struct pool_slot *p = bpf_map_lookup_elem(&pools, &key);
	__u64 bit = 1ULL << (ordinal % 64);

	return p && ordinal < POOL_ORDINALS_MAX &&
	       __sync_fetch_and_and(&p->idle[ordinal / 64], ~bit) & bit;
}

#endif /* RESPONSE_BPF_H */
