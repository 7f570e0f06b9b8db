/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a chunk of requests means, found without side effects: the caller commits or forgets the result.
 */
#ifndef REQUEST_BPF_H
#define REQUEST_BPF_H

#include "lanes.bpf.h"

#define WIRE_LOAD(skb, off, to, n) bpf_skb_load_bytes(skb, off, to, n)
#define WIRE_LOAD_N(skb, off, to, n) load_head(skb, off, to, n)

/* One to five bytes; the compiler must not drop the bounds, the verifier does not know them. */
static __always_inline long load_head(struct __sk_buff *skb, __u32 off, void *to, __u32 n)
{
	barrier_var(n);
	if (n < 1 || n > WIRE_HEAD)
		return -1;
	return bpf_skb_load_bytes(skb, off, to, n);
}

struct request_scan {
	struct __sk_buff *skb;
	struct wire_state w;
	__u32 off;
	__u32 end;
	__u32 messages; /* heads seen */
	__u32 syncs;	/* ReadyForQuery to expect: Query, Sync, FunctionCall */
	__u32 reason;	/* not REASON_NONE: user space must take the chunk */
	__u8 open;	/* messages without their Sync */
	__u8 unnamed;	/* an unnamed statement was parsed on this link */
	__u8 extended;
	__u8 copy;	/* inside COPY FROM STDIN */
	__u8 linked;
	__u8 done;
	__u8 pad[2];
	/* Where the unnamed statement was parsed in this chunk, end if it was bound since. A position, because a flag
	 * that can fall doubles the paths of the verifier. */
	__u32 unbound_at;
};

/* Parse, Bind, Describe and Close: is it about a named statement? Two bytes of the body decide. */
static __always_inline __u32 judge_names(struct request_scan *s, const struct wire_msg *m)
{
	__u8 name[2] = {};

	if (m->type == 'P') {
		if (m->body >= s->end || bpf_skb_load_bytes(s->skb, m->body, name, 1))
			return REASON_SPLIT;
		if (name[0])
			return REASON_NAMED_STATEMENT;
		s->unnamed = 1;
		s->unbound_at = m->body;
		return REASON_NONE;
	}
	if (m->body + 2 > s->end || bpf_skb_load_bytes(s->skb, m->body, name, 2))
		return REASON_SPLIT;
	if (m->type == 'B') { /* String portal, String statement */
		if (name[0])
			return REASON_NAMED_PORTAL;
		if (name[1])
			return REASON_NAMED_STATEMENT;
		s->unbound_at = s->end;
		return s->unnamed ? REASON_NONE : REASON_UNNAMED_BIND;
	}
	/* Describe, Close: Byte1 'S' or 'P', String name. A portal lives inside its transaction, thus its link. */
	if (name[0] == 'P')
		return REASON_NONE;
	if (name[1])
		return REASON_NAMED_STATEMENT;
	if (m->type == 'D')
		return s->unnamed ? REASON_NONE : REASON_UNNAMED_BIND;
	s->unnamed = 0;
	return REASON_NONE;
}

static __always_inline __u32 judge_request(struct request_scan *s, const struct wire_msg *m)
{
	/* The backend ignores Sync and Flush during COPY FROM STDIN, which would break the count. */
	if (s->copy != (m->type == 'd' || m->type == 'c' || m->type == 'f'))
		return m->type == 'X' ? REASON_TERMINATE : REASON_COPY_STRAY;
	switch (m->type) {
	case 'Q':
	case 'F':
	case 'S':
		s->syncs++;
		s->open = 0;
		return REASON_NONE;
	case 'P':
	case 'B':
	case 'D':
	case 'C':
		if (m->length < 2)
			return REASON_LENGTH;
		s->open = 1;
		s->extended = 1;
		return judge_names(s, m);
	case 'E':
	case 'H':
		s->open = 1;
		s->extended = 1;
		return REASON_NONE;
	case 'd':
	case 'c':
	case 'f':
		return REASON_NONE;
	case 'X':
		return REASON_TERMINATE;
	default:
		return REASON_TYPE;
	}
}

static long request_step(__u32 i, void *context)
{
	struct request_scan *s = context;
	struct wire_msg m = {};
	int result = WIRE_NEXT(&s->w, s->skb, s->off, s->end, message_length_max, &m);

	if (result == WIRE_END) {
		s->done = 1;
		return 1;
	}
	if (result == WIRE_BAD) {
		s->reason = REASON_LENGTH;
		return 1;
	}
	s->messages++;
	s->reason = judge_request(s, &m);
	return s->reason != REASON_NONE;
}

/* Walks the whole chunk; worst case MESSAGES_MAX steps. Sets reason when a lane may not forward it. */
static __always_inline void scan_request(struct request_scan *s)
{
	bpf_loop(MESSAGES_MAX, request_step, s, 0);
	if (s->reason)
		return;
	if (!s->done)
		s->reason = REASON_MESSAGES;
	else if (s->w.hdr_len) /* so that hand-over is never inside a head */
		s->reason = REASON_SPLIT;
	else if (s->unbound_at < s->end) /* its Bind may come on another server: user space parses it again there */
		s->reason = REASON_UNNAMED_PARSE;
	else if (s->open) /* so that hand-over never leaves answers that user space cannot count */
		s->reason = REASON_BATCH;
}

#undef WIRE_LOAD
#undef WIRE_LOAD_N
#endif /* REQUEST_BPF_H */
