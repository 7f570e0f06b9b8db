/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a chunk of requests means, found without side effects: the caller commits or forgets the result.
 */
#ifndef REQUEST_BPF_H
#define REQUEST_BPF_H

#include "lanes.bpf.h"

/* The largest length word of messages without user's data: PQ_SMALL_MESSAGE_LIMIT, MAX_SMALL_MESSAGE_LEN of crate wire. */
#define SMALL_MESSAGE_MAX 10000u

#define WIRE_LOAD(skb, off, to, n) bpf_skb_load_bytes(skb, off, to, n)
#define WIRE_LOAD_N(skb, off, to, n) load_head(skb, off, to, n)

/* One to five bytes; the compiler must not drop the bounds, the verifier does not know them. */
static __always_inline long load_head(struct __sk_buff *skb, __u32 off, void *to, __u32 n)
{
	barrier_var(n);
	if (n < 1 || n > WIRE_HEAD)
		return -1;
	return bpf_skb_load_bytes(skb, off, to, seen_1_to(8, n));
}

/* Uses of named statements in a chunk: where the name is, which statement. */
struct statement_uses {
	__u32 count;
	__u32 at[STATEMENT_USES_MAX];
	__u32 of[STATEMENT_USES_MAX];
};

struct request_scan {
	struct __sk_buff *skb;
	struct wire_state w;
	__u32 off;
	__u32 end;
	__u32 syncs;	/* ReadyForQuery to expect: Query, Sync, FunctionCall */
	__u32 reason;	/* not REASON_NONE: user space must take the chunk */
	__u8 open;	/* messages without their Sync */
	__u8 unnamed;	/* an unnamed statement was parsed on this link */
	__u8 copy;	/* inside COPY FROM STDIN */
	__u8 linked;
	__u8 done;
	__u8 pinned; /* session pooling: names are the client's and the server's own, and a batch may stay open */
	__u8 extended; /* the last message is of the extended protocol */
	__u8 pad;
	/* Where the unnamed statement was parsed in this chunk, end if it was bound since. A position, because a flag
	 * that can fall doubles the paths of the verifier. */
	__u32 unbound_at;
	__u32 client; /* index of its slot */
	struct statement_uses uses;
};

/* The bits of word below its first zero byte; all of it when there is none. */
static __always_inline __u64 below_nul(__u64 word)
{
	__u64 nul = (word - 0x0101010101010101ULL) & ~word & 0x8080808080808080ULL;

	return nul ? ((nul & -nul) >> 7) - 1 : ~0ULL;
}

/*
 * What the name at off stands for, by the client's table, in a message that ends at end: 0 if that is unknown here, -1 if the name
 * does not end in this chunk. A global function, which the verifier walks once and not on each path.
 */
__noinline int named_statement(struct __sk_buff *skb, __u32 off, __u32 end, __u32 client)
{
	struct client_statement key = { .client = client };
	__u64 *words = (__u64 *)key.name, keep = ~0ULL;
	__u32 n, last = end < skb->len ? end : skb->len, *found;

	if (off >= last)
		return end > skb->len ? -1 : 0;
	n = last - off;
	if (n > sizeof(key.name))
		n = sizeof(key.name);
	barrier_var(n);
	if (n < 1 || n > sizeof(key.name))
		return -1;
	n = seen_1_to(64, n);
	if (bpf_skb_load_bytes(skb, off, key.name, n))
		return -1;
	/* Behind what was loaded is a zero: a name that is cut there is told by its length. */
	for (int i = 0; i < (STATEMENT_NAME_MAX + 1) / 8; i++) {
		__u64 mask = below_nul(words[i]);

		words[i] &= keep & mask;
		if (mask != ~0ULL)
			keep = 0;
	}
	barrier_var(n);
	if (n <= STATEMENT_NAME_MAX && key.name[n - 1])
		return end > skb->len ? -1 : 0;
	if (keep)
		return 0;
	found = bpf_map_lookup_elem(&client_statements, &key);
	return found ? *found : 0;
}

/* Notes the use of a named statement, whose name follows the first byte of the body. */
static __always_inline __u32 use_statement(struct request_scan *s, const struct wire_msg *m)
{
	__u32 off = m->body + 1;
	int statement = named_statement(s->skb, off, m->body + m->length, s->client);
	__u32 use = s->uses.count;

	if (statement <= 0)
		return statement ? REASON_SPLIT : REASON_NAMED_STATEMENT;
	if (use >= STATEMENT_USES_MAX)
		return REASON_STATEMENTS;
	s->uses.at[use] = off;
	s->uses.of[use] = statement;
	s->uses.count = use + 1;
	return REASON_NONE;
}

/* Whether the server has all that the chunk uses. Global, as named_statement(). */
__noinline int has_statements(struct statement_uses *uses, __u32 server)
{
	struct server_statement key = { .server = server };

	if (!uses)
		return 0;
	for (__u32 i = 0; i < STATEMENT_USES_MAX && i < uses->count; i++) {
		key.statement = uses->of[i];
		if (!bpf_map_lookup_elem(&server_statements, &key))
			return 0;
	}
	return 1;
}

/* Writes the server's names over the client's, which are as long. The chunk is writable. */
__noinline int rename_statements(struct __sk_buff *skb, struct statement_uses *uses, __u32 server)
{
	struct server_statement key = { .server = server };

	if (!uses)
		return -1;
	for (__u32 i = 0; i < STATEMENT_USES_MAX && i < uses->count; i++) {
		struct statement_name *name;
		__u32 length;

		key.statement = uses->of[i];
		name = bpf_map_lookup_elem(&server_statements, &key);
		if (!name)
			return -1;
		length = name->length;
		barrier_var(length);
		if (length < 1 || length > STATEMENT_NAME_MAX)
			return -1;
		bpf_skb_store_bytes(skb, uses->at[i], name->name, seen_1_to(64, length), 0);
	}
	return 0;
}

/* Parse, Bind, Describe and Close: is it about a named statement? Two bytes of the body decide. */
static __always_inline __u32 judge_names(struct request_scan *s, const struct wire_msg *m)
{
	__u8 name[2] = {};

	if (s->pinned)
		return REASON_NONE;
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
			return use_statement(s, m);
		s->unbound_at = s->end;
		return s->unnamed ? REASON_NONE : REASON_UNNAMED_BIND;
	}
	/* Describe, Close: Byte1 'S' or 'P', String name. A portal lives inside its transaction, thus its link. */
	if (name[0] == 'P')
		return REASON_NONE;
	if (name[1])
		return m->type == 'D' ? use_statement(s, m) : REASON_NAMED_STATEMENT;
	if (m->type == 'D')
		return s->unnamed ? REASON_NONE : REASON_UNNAMED_BIND;
	s->unnamed = 0;
	return REASON_NONE;
}

/* Without branches, and anew for each message: the verifier would walk every order of the two protocols. */
static __always_inline __u8 is_extended(__u32 type)
{
	return 1 ^ (is_zero(type ^ 'Q') | is_zero(type ^ 'F') | is_zero(type ^ 'd') | is_zero(type ^ 'c') |
		    is_zero(type ^ 'f'));
}

/* Of the types that carry user's data the length is limited by message_length_max only. */
static __always_inline __u8 is_large(__u32 type)
{
	return is_zero(type ^ 'Q') | is_zero(type ^ 'F') | is_zero(type ^ 'd') | is_zero(type ^ 'P') |
	       is_zero(type ^ 'B');
}

static __always_inline __u32 judge_request(struct request_scan *s, const struct wire_msg *m)
{
	if (!is_large(m->type) && m->length > SMALL_MESSAGE_MAX - 4)
		return REASON_LENGTH;
	/* A CopyInResponse that is the last to come is the last request's, see commit_response(). */
	s->extended = is_extended(m->type);
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
		return judge_names(s, m);
	case 'E':
	case 'H':
		s->open = 1;
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
	s->reason = judge_request(s, &m);
	return s->reason != REASON_NONE;
}

/* Walks the whole chunk; worst case MESSAGES_MAX steps. Sets reason when a lane may not forward it. */
static __always_inline void scan_request(struct request_scan *s)
{
	bpf_loop(MESSAGES_MAX, request_step, s, 0);
	s->syncs |= unknown_zero();
	s->extended |= unknown_zero();
	if (s->reason)
		return;
	if (!s->done)
		s->reason = REASON_MESSAGES;
	else if (s->w.hdr_len) /* so that hand-over is never inside a head */
		s->reason = REASON_SPLIT;
	else if (s->unbound_at < s->end) /* its Bind may come on another server: user space parses it again there */
		s->reason = REASON_UNNAMED_PARSE;
	else if (s->open && !s->pinned) /* the server could not go to another client before its Sync: user space waits for that */
		s->reason = REASON_BATCH;
}

#undef WIRE_LOAD
#undef WIRE_LOAD_N
#endif /* REQUEST_BPF_H */
