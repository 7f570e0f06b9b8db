/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a chunk of requests means, found without side effects. Included once per kind of source: the including file defines
 * REQUEST_SOURCE (the context type), REQUEST_NAME(x) (a suffix), REQUEST_SIZE, WIRE_LOAD and WIRE_LOAD_N, and REQUEST_LOAD and
 * REQUEST_STORE of 1 to 64 bytes.
 */

/*
 * What the name at off stands for, by the client's table, in a message that ends at end: 0 if that is unknown here, -1 if the name
 * does not end in this chunk. A global function, which the verifier walks once and not on each path.
 */
__noinline int REQUEST_NAME(named_statement)(REQUEST_SOURCE *source, __u32 off, __u32 end, __u32 client)
{
	struct client_statement key = { .client = client };
	__u64 *words = (__u64 *)key.name, keep = ~0ULL;
	__u32 n, last = end < REQUEST_SIZE(source) ? end : REQUEST_SIZE(source), *found;

	if (off >= last)
		return end > REQUEST_SIZE(source) ? -1 : 0;
	n = last - off;
	if (n > sizeof(key.name))
		n = sizeof(key.name);
	barrier_var(n);
	if (n < 1 || n > sizeof(key.name))
		return -1;
	n = seen_1_to(64, n);
	if (REQUEST_LOAD(source, off, key.name, n))
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
		return end > REQUEST_SIZE(source) ? -1 : 0;
	if (keep)
		return 0;
	found = bpf_map_lookup_elem(&client_statements, &key);
	return found ? *found : 0;
}

/* Notes the use of a named statement, whose name follows the first byte of the body. */
static __always_inline __u32 REQUEST_NAME(use_statement)(struct request_scan *s, const struct wire_msg *m)
{
	__u32 off = m->body + 1;
	int statement = REQUEST_NAME(named_statement)(s->source, off, m->body + m->length, s->client);
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

/* Writes the server's names over the client's, which are as long. The chunk is writable. */
__noinline int REQUEST_NAME(rename_statements)(REQUEST_SOURCE *source, struct statement_uses *uses, __u32 server)
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
		REQUEST_STORE(source, uses->at[i], name->name, seen_1_to(64, length));
	}
	return 0;
}

/* Parse, Bind, Describe and Close: is it about a named statement? Two bytes of the body decide. */
static __always_inline __u32 REQUEST_NAME(judge_names)(struct request_scan *s, const struct wire_msg *m)
{
	REQUEST_SOURCE *source = s->source;
	__u8 name[2] = {};

	if (s->pinned)
		return REASON_NONE;
	if (m->type == 'P') {
		if (m->body >= s->end || WIRE_LOAD(source, m->body, name, 1))
			return REASON_SPLIT;
		if (name[0])
			return REASON_NAMED_STATEMENT;
		s->unnamed |= UNNAMED_CYCLE | UNNAMED_LINK >> s->open;
		s->unbound_at = m->body;
		return REASON_NONE;
	}
	if (m->body + 2 > s->end || WIRE_LOAD(source, m->body, name, 2))
		return REASON_SPLIT;
	if (m->type == 'B') { /* String portal, String statement */
		if (name[0])
			return REASON_NAMED_PORTAL;
		if (name[1])
			return REQUEST_NAME(use_statement)(s, m);
		s->unbound_at = s->end;
		return s->unnamed ? REASON_NONE : REASON_UNNAMED_BIND;
	}
	/* Describe, Close: Byte1 'S' or 'P', String name. A portal lives inside its transaction, thus its link. */
	if (name[0] == 'P')
		return REASON_NONE;
	if (name[1])
		return m->type == 'D' ? REQUEST_NAME(use_statement)(s, m) : REASON_NAMED_STATEMENT;
	if (m->type == 'D')
		return s->unnamed ? REASON_NONE : REASON_UNNAMED_BIND;
	s->unnamed = 0;
	return REASON_NONE;
}

static __always_inline __u32 REQUEST_NAME(judge_request)(struct request_scan *s, const struct wire_msg *m)
{
	__u32 reason;

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
		/* Behind an error of the batch all but Sync is discarded, and no ReadyForQuery answers it. Without a branch, as is_extended(). */
		reason = REASON_BATCH & -(__u32)(s->open & (1 ^ is_zero(m->type ^ 'S')));
		s->syncs++;
		s->open = 0;
		s->unnamed &= UNNAMED_LINK;
		s->unnamed |= s->unnamed >> 1;
		return reason;
	case 'P':
	case 'B':
	case 'D':
	case 'C':
		if (m->length < 2)
			return REASON_LENGTH;
		reason = REQUEST_NAME(judge_names)(s, m);
		s->open = 1;
		return reason;
	case 'E':
	case 'H':
		s->open = 1;
		return REASON_NONE;
	case 'd':
		return REASON_NONE;
	case 'c':
	case 'f':
		/* What follows is no COPY's any more, which the link says until its ReadyForQuery: user space knows. */
		return REASON_COPY_END;
	case 'X':
		return REASON_TERMINATE;
	default:
		return REASON_TYPE;
	}
}

static long REQUEST_NAME(request_step)(__u32 i, void *context)
{
	struct request_scan *s = context;
	REQUEST_SOURCE *source = s->source;
	struct wire_msg m = {};
	int result = WIRE_NEXT(&s->w, source, s->off, s->end, message_length_max, &m);

	if (result == WIRE_END) {
		s->done = 1;
		return 1;
	}
	if (result == WIRE_BAD) {
		s->reason = REASON_LENGTH;
		return 1;
	}
	s->reason = REQUEST_NAME(judge_request)(s, &m);
	return s->reason != REASON_NONE;
}

/* Walks the whole chunk; worst case MESSAGES_MAX steps. Sets reason when a lane may not forward it. */
static __always_inline void REQUEST_NAME(scan_request)(struct request_scan *s)
{
	bpf_loop(MESSAGES_MAX, REQUEST_NAME(request_step), s, 0);
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

#undef REQUEST_SOURCE
#undef REQUEST_NAME
#undef REQUEST_SIZE
#undef REQUEST_LOAD
#undef REQUEST_STORE
#undef WIRE_LOAD
#undef WIRE_LOAD_N
