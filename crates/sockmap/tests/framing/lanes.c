// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The lane programs as they are, with one client, one server and one pool, and a kernel that does all that is asked of it: what it
 * redirects has arrived. A line per piece says what became of it.
 *
 * Beside what the text says, each piece is checked for what holds whatever it means: it is forwarded whole or passed whole; what is passed
 * has changed nothing; and a scan of the same bytes as a send() (lanes A and B) finds the same as one of a segment (lane D).
 */
#include <stdlib.h>
#include <string.h>

#include "framing.h"

#include "../../src/bpf/lanes.bpf.c"

#define CLIENT 3u
#define SERVER 5u
#define POOL 1u
#define ORDINAL 9u
#define CLIENT_COOKIE 11u
#define SERVER_COOKIE 12u

struct segment {
	struct __sk_buff skb;
	const struct piece *piece;
};

static struct client_slot client;
static struct server_slot server;
static struct pool_slot pool;
static struct lane_control lane;
static struct tcp_sock near;
static struct bpf_sock sock;
static __u64 counts[REASON_NR + COUNTER_NR];
static const struct piece *sent; /* what a struct sk_msg_md is about */
static __u64 clock_ns;
static __u32 redirected;

#define X(ident, name, meaning) name,
static const char *const reasons[] = { LANE_REASONS(X) };
#undef X

/* ---- the kernel ------------------------------------------------------------------------------------- */

/*
 * The client has prepared all names that begin with `s`; statement n is the one whose name has n bytes. The server has those of an odd
 * length, under names of that length.
 */
static void *lookup_name(const void *at)
{
	static __u32 statement;
	struct client_statement key;

	memcpy(&key, at, sizeof(key));
	CHECK(key.client == CLIENT && !key.pad && !key.name[STATEMENT_NAME_MAX]);
	statement = strlen((char *)key.name);
	for (__u32 i = statement; i < sizeof(key.name); i++)
		CHECK(!key.name[i]);
	return key.name[0] == 's' ? &statement : NULL;
}

static void *lookup_statement(const void *at)
{
	static struct statement_name name;
	struct server_statement key;

	memcpy(&key, at, sizeof(key));
	CHECK(key.server == SERVER && key.statement >= 1 && key.statement <= STATEMENT_NAME_MAX);
	name.length = key.statement;
	memset(name.name, 'u', sizeof(name.name));
	return key.statement % 2 ? &name : NULL;
}

void *bpf_map_lookup_elem(const void *map, const void *key)
{
	static __u32 slot;
	__u64 cookie;
	__u32 index;

	if (map == &client_statements)
		return lookup_name(key);
	if (map == &server_statements)
		return lookup_statement(key);
	if (map == &client_cookie || map == &server_cookie) {
		memcpy(&cookie, key, sizeof(cookie));
		CHECK(cookie == (map == &client_cookie ? CLIENT_COOKIE : SERVER_COOKIE));
		slot = map == &client_cookie ? CLIENT : SERVER;
		return &slot;
	}
	memcpy(&index, key, sizeof(index));
	if (map == &clients)
		return index == CLIENT ? &client : NULL;
	if (map == &servers)
		return index == SERVER ? &server : NULL;
	if (map == &pools)
		return index == POOL ? &pool : NULL;
	if (map == &control)
		return &lane;
	if (map == &client_socks)
		return &sock;
	CHECK(map == &counters && index < REASON_NR + COUNTER_NR);
	return &counts[index];
}

long bpf_loop(__u32 rounds, long (*step)(__u32 i, void *context), void *context, __u64 flags)
{
	__u32 i = 0;

	CHECK(!flags);
	while (i < rounds)
		if (step(i++, context))
			break;
	return i;
}

__u64 bpf_ktime_get_ns(void)
{
	return ++clock_ns;
}

__u32 bpf_get_prandom_u32(void)
{
	return 0;
}

__u64 bpf_get_current_pid_tgid(void)
{
	return 1;
}

/* Of the kernel's memory there is only a send. */
long bpf_probe_read_kernel(void *to, __u32 n, const void *from)
{
	if (!sent || (const __u8 *)from < sent->bytes || (const __u8 *)from >= sent->bytes + sent->size)
		return -1;
	memcpy(to, from, n);
	return 0;
}

long bpf_skb_load_bytes(const void *skb, __u32 off, void *to, __u32 n)
{
	const struct piece *piece = ((const struct segment *)skb)->piece;

	if (off > piece->size || n > piece->size - off) {
		memset(to, 0, n);
		return -1;
	}
	memcpy(to, piece->bytes + off, n);
	return 0;
}

long bpf_skb_store_bytes(struct __sk_buff *skb, __u32 off, const void *from, __u32 n, __u64 flags)
{
	const struct piece *piece = ((struct segment *)skb)->piece;

	CHECK(!flags && off <= piece->size && n <= piece->size - off);
	memcpy(piece->bytes + off, from, n);
	return 0;
}

long bpf_skb_pull_data(struct __sk_buff *skb, __u32 n)
{
	return n <= skb->len ? 0 : -1;
}

long bpf_skb_adjust_room(struct __sk_buff *skb, __s32 n, __u32 mode, __u64 flags)
{
	abort();
}

__u64 bpf_get_socket_cookie(void *context)
{
	return ((struct segment *)context)->piece->what & PIECE_SERVER ? SERVER_COOKIE : CLIENT_COOKIE;
}

long bpf_sk_redirect_map(struct __sk_buff *skb, const void *map, __u32 key, __u64 flags)
{
	CHECK(!flags && !redirected);
	if (((struct segment *)skb)->piece->what & PIECE_SERVER) {
		CHECK(map == &client_socks && key == CLIENT);
		near.write_seq += skb->len;
	} else {
		CHECK(map == &server_socks && key == SERVER);
	}
	redirected = skb->len;
	return SK_PASS;
}

long bpf_msg_pull_data(struct sk_msg_md *msg, __u32 begin, __u32 end, __u64 flags)
{
	abort();
}

long bpf_msg_push_data(struct sk_msg_md *msg, __u32 begin, __u32 length, __u64 flags)
{
	abort();
}

long bpf_msg_apply_bytes(struct sk_msg_md *msg, __u32 bytes)
{
	abort();
}

long bpf_tail_call(void *context, const void *programs, __u32 index)
{
	abort();
}

long bpf_msg_redirect_map(struct sk_msg_md *msg, const void *map, __u32 key, __u64 flags)
{
	abort();
}

long bpf_msg_redirect_hash(struct sk_msg_md *msg, const void *map, const void *key, __u64 flags)
{
	abort();
}

struct tcp_sock *bpf_skc_to_tcp_sock(void *sk)
{
	return &near;
}

void *bpf_sk_storage_get(const void *map, void *sk, void *value, __u64 flags)
{
	abort();
}

long bpf_sk_release(void *sk)
{
	return 0;
}

void *bpf_ringbuf_reserve(const void *ring, __u64 size, __u64 flags)
{
	static struct lane_event event;

	CHECK(ring == &events && size == sizeof(event));
	return &event;
}

void bpf_ringbuf_submit(void *data, __u64 flags)
{
}

void bpf_ringbuf_discard(void *data, __u64 flags)
{
	abort();
}

__u64 bpf_ringbuf_query(const void *ring, __u64 flags)
{
	abort();
}

/* ---- a piece ---------------------------------------------------------------------------------------- */

/* What a piece that is passed to user space must leave alone. */
struct books {
	__u64 link;
	__u64 client_expect;
	__u64 server_expect;
	__u64 req_fwd;
	__u64 fwd;
	__u64 resp_bytes;
	__u64 queries;
	__u64 query_ns;
	__u64 xacts;
	__u64 xact_ns;
	__u64 peer;
	struct wire_state req;
	struct wire_state resp;
	__u32 client_flags;
	__u32 cycle_bytes;
	__u32 run_bytes;
	__u32 server_flags;
};

static void look(struct books *books)
{
	memset(books, 0, sizeof(*books));
	books->link = client.link;
	books->client_expect = client.tx_expect;
	books->server_expect = server.tx_expect;
	books->req_fwd = client.req_fwd;
	books->fwd = server.fwd;
	books->resp_bytes = client.resp_bytes;
	books->queries = client.queries;
	books->query_ns = client.query_ns;
	books->xacts = client.xacts;
	books->xact_ns = client.xact_ns;
	books->peer = server.peer;
	books->req = client.req;
	books->resp = server.resp;
	books->client_flags = client.flags;
	books->cycle_bytes = client.cycle_bytes;
	books->run_bytes = server.run_bytes;
	books->server_flags = server.flags;
}

/* FNV-1a */
static __u32 hash(const struct piece *piece)
{
	__u32 h = 2166136261u;

	for (__u32 i = 0; i < piece->size; i++)
		h = (h ^ piece->bytes[i]) * 16777619u;
	return h;
}

static int in_idle_set(void)
{
	return !!(pool.idle[0] & 1ULL << ORDINAL);
}

static void say_link(const char *who)
{
	__u64 link = client.link;

	CHECK(!(link & LINK_LINKED) || link_server(link) == SERVER);
	CHECK(server.peer == (link & LINK_LINKED ? PEER_LINKED | CLIENT : 0));
	CHECK(in_idle_set() == !(link & LINK_LINKED));
	say("%s linked %d pending %u open %d status %llu copy %d extended %d", who, !!(link & LINK_LINKED),
	    link_pending(link), !!(link & LINK_OPEN), (link & LINK_STATUS_MASK) >> LINK_STATUS_SHIFT,
	    !!(link & LINK_COPY), !!(link & LINK_EXTENDED));
}

/* The scan of a piece as a send, and the renaming of its statements in `copy`. */
static void scan_as_send(const struct piece *piece, struct piece *copy)
{
	struct segment segment = { .skb.len = piece->size, .piece = piece };
	struct sk_msg_md msg = { .data = copy->bytes, .data_end = copy->bytes + copy->size, .size = copy->size };
	struct request_scan one = {
		.source = &segment.skb, .w = client.req, .end = piece->size, .unbound_at = piece->size, .client = CLIENT,
	};
	struct request_scan other = one;

	other.source = &msg;
	begin_scan(&one, &client, client.link, &lane);
	begin_scan(&other, &client, client.link, &lane);
	scan_request_skb(&one);
	scan_request_msg(&other);
	if (!other.reason && other.uses.count && has_statements(&other.uses, SERVER))
		rename_statements_msg(&msg, &other.uses, SERVER);
	other.source = one.source;
	CHECK(!memcmp(&one, &other, sizeof(one)));
}

static void scan_as_answer(const struct piece *piece, struct piece *copy)
{
	struct segment segment = { .skb.len = piece->size, .piece = piece };
	struct sk_msg_md msg = { .data = copy->bytes, .data_end = copy->bytes + copy->size, .size = copy->size };
	struct response_scan one = {
		.source = &segment.skb, .w = server.resp, .end = piece->size, .error_at = piece->size,
		.pinned = is_pinned(&client),
	};
	struct response_scan other = one;

	other.source = &msg;
	scan_response_skb(&one);
	scan_response_msg(&other);
	other.source = one.source;
	CHECK(!memcmp(&one, &other, sizeof(one)));
}

static int request(struct segment *segment, struct books *before)
{
	const struct piece *piece = segment->piece;
	struct books after;

	CHECK(request_skb(&segment->skb) == SK_PASS);
	CHECK((client.req_dir & DIR_BYTES) == client.req_fwd + client.req_passed);
	if (client.req_dir & DIR_USER) {
		look(&after);
		/* A session's queue is measured anew between two requests, also if the next one goes up. */
		if (client.link & LINK_PINNED && !after.run_bytes)
			after.run_bytes = before->run_bytes;
		CHECK(!redirected && !memcmp(before, &after, sizeof(after)));
		say("request up %s\n", reasons[client.reason]);
		return 1;
	}
	CHECK(redirected == piece->size && client.req_fwd == before->req_fwd + piece->size);
	CHECK(server.tx_expect == before->server_expect + piece->size);
	say_link("request");
	say(" unnamed %d batch %d named %d need %u head %u hash %08x\n", !!(client.flags & CLI_UNNAMED),
	    !!(client.flags & CLI_BATCH), !!(client.flags & CLI_NAMED), client.req.need, client.req.hdr_len,
	    hash(piece));
	return 0;
}

static int response(struct segment *segment, struct books *before)
{
	const struct piece *piece = segment->piece;
	__u32 was = hash(piece);
	struct books after;

	CHECK(response_skb(&segment->skb) == SK_PASS);
	CHECK((server.dir & DIR_BYTES) == server.fwd + server.passed);
	if (server.passed) {
		look(&after);
		CHECK(!redirected && !memcmp(before, &after, sizeof(after)));
		CHECK(server.dir & DIR_USER);
		say("response up %s\n", reasons[server.reason]);
		return 1;
	}
	CHECK(redirected == piece->size && server.fwd == before->fwd + piece->size && hash(piece) == was);
	CHECK(client.tx_expect == before->client_expect + piece->size);
	CHECK(client.resp_bytes == before->resp_bytes + piece->size);
	say_link("response");
	say(" need %u head %u queries %llu xacts %llu\n", server.resp.need, server.resp.hdr_len,
	    client.queries - before->queries, client.xacts - before->xacts);
	if (!(server.dir & DIR_USER))
		return 0;
	CHECK(client.link & LINK_HELD);
	say("hold %s\n", reasons[server.reason]);
	return 1;
}

void lane_begin(int pinned)
{
	memset(&client, 0, sizeof(client));
	memset(&server, 0, sizeof(server));
	memset(&near, 0, sizeof(near));
	client.link = pinned ? LINK_PINNED : 0;
	client.in_use = 1;
	client.pool = POOL;
	client.fingerprint = 77;
	server.in_use = 1;
	server.pool = POOL;
	server.ordinal = ORDINAL;
	server.fingerprint = 77;
	pool.ordinals = ORDINAL + 1;
	pool.member[ORDINAL].server = SERVER;
	pool.member[ORDINAL].fingerprint = 77;
	pool.idle[0] = 1ULL << ORDINAL;
}

int lane_piece(const struct piece *piece)
{
	struct segment segment = { .skb.len = piece->size, .skb.sk = &sock, .piece = piece };
	struct piece copy = *piece;
	/* The programs of a send do not look at a longer one. */
	int is_send = piece->size <= MSG_BYTES_MAX - (piece->what & PIECE_SERVER ? 0 : STATEMENT_NAME_MAX);
	struct books before;
	int over;

	if (piece->what & PIECE_RETIRE)
		server.flags |= SRV_RETIRE;
	if (piece->what & PIECE_HOLD)
		client.link |= LINK_HELD;
	if (!piece->size)
		return 0;
	copy.bytes = malloc(piece->size);
	CHECK(copy.bytes);
	memcpy(copy.bytes, piece->bytes, piece->size);
	sent = &copy;
	redirected = 0;
	look(&before);
	if (piece->what & PIECE_SERVER) {
		if (is_send)
			scan_as_answer(piece, &copy);
		over = response(&segment, &before);
	} else {
		if (is_send)
			scan_as_send(piece, &copy);
		over = request(&segment, &before);
		CHECK(over || !is_send || !memcmp(copy.bytes, piece->bytes, piece->size));
	}
	sent = NULL;
	free(copy.bytes);
	return over;
}
