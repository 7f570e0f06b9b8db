/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a chunk of responses means, found without side effects. Included once per kind of source: the including
 * file defines RESPONSE_SOURCE (the context type), RESPONSE_NAME(x) (a suffix), WIRE_LOAD and WIRE_LOAD_N.
 */

/* "DISCARD ALL" and "DEALLOCATE ALL" drop prepared statements that user space believes to be there; not in a session. */
static __always_inline int RESPONSE_NAME(drops_statements)(RESPONSE_SOURCE *source, const struct wire_msg *m,
							  __u32 end, __u32 pinned)
{
	/* In a session no length is one of the two; a branch would double the paths behind it. */
	__u32 length = m->length + (pinned << 12);
	__u8 tag[5] = {};

	if (length != sizeof("DISCARD ALL") && length != sizeof("DEALLOCATE ALL"))
		return 0;
	if (m->body + sizeof(tag) > end || WIRE_LOAD(source, m->body, tag, 5))
		return 1; /* unknown: as if */
	return tag[0] == 'D' && (tag[1] == 'I' || tag[2] == 'A'); /* DIscard, DeAllocate; not DElete */
}

static long RESPONSE_NAME(response_step)(__u32 i, void *context)
{
	struct response_scan *s = context;
	RESPONSE_SOURCE *source = s->source;
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
	s->trailing = 1;
	switch (m.type) {
	case 'D': /* DataRow first: most messages are */
	case 'T':
	case '1':
	case '2':
	case '3':
	case 'n':
	case 't':
	case 's':
	case 'I':
	case 'N':
	case 'H':
	case 'd':
	case 'c':
	case 'V':
		break;
	case 'Z':
		s->rfq++;
		s->trailing = 0;
		s->copy_in = 0;
		s->status = m.status;
		s->idles += is_zero(m.status ^ 'I');
		break;
	case 'C':
		if (RESPONSE_NAME(drops_statements)(source, &m, s->end, s->pinned)) {
			s->reason = REASON_DIRTY;
			return 1;
		}
		break;
	case 'E':
		/* The last byte of its head: the body may begin with the next chunk. */
		s->error_at = m.body - 1;
		break;
	case 'A': /* a notification belongs to whoever is linked */
		break;
	case 'S': /* user space must learn the value before anybody else is linked */
		s->reason = REASON_DIRTY;
		return 1;
	case 'G':
		s->copy_in = 1;
		break;
	default: /* Authentication, BackendKeyData, CopyBothResponse, anything new */
		s->reason = REASON_TYPE;
		return 1;
	}
	return 0;
}

/* Walks the whole chunk; worst case MESSAGES_MAX steps. Sets reason when a lane may not forward it. */
static __always_inline void RESPONSE_NAME(scan_response)(struct response_scan *s)
{
	bpf_loop(MESSAGES_MAX, RESPONSE_NAME(response_step), s, 0);
	s->rfq |= unknown_zero();
	s->idles |= unknown_zero();
	s->status |= unknown_zero();
	s->trailing |= unknown_zero();
	s->copy_in |= unknown_zero();
	if (!s->reason && !s->done)
		s->reason = REASON_MESSAGES;
}

#undef RESPONSE_SOURCE
#undef RESPONSE_NAME
#undef WIRE_LOAD
#undef WIRE_LOAD_N
