// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Naive pooling: clients take servers in turn, one request and one answer each, and whoever finds none waits in the kernel. No protocol, no state of
 * sessions, no user space: what a queue alone costs, for the benchmark.
 *
 * A program cannot keep a segment, but it can copy one and drop it. A backend's own send() then brings the copy along: its bytes are pushed in front of
 * the answer and redirected into that backend's own receive queue, and the program runs once more for the rest, which goes to the client whose answer it
 * is. So the backend finds its next request when its send() returns.
 *
 * A request is one segment, an answer one send(). A request of more than KEPT_BYTES that finds no server is passed to user space, which does nothing
 * with it: benchmarks have none.
 *
 * Invariant: the programs make a server idle only while nobody waits; `busy` and the queue change under the lock. One that user space adds while clients
 * wait is for requests that come later; those that wait are the busy ones' to bring.
 */
#include "kernel.bpf.h"
#include "bits.bpf.h"

#define CLIENTS_MAX 256
#define SERVERS_MAX 64
#define KEPT_BYTES 1024

/* Answers go into the applications' own sockets, and requests come out of them while a server is idle. */
const volatile __u32 both_ways = 0;

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, CLIENTS_MAX);
	__type(key, __u32);
	__type(value, __u64);
} kept_clients SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, CLIENTS_MAX);
	__type(key, __u32);
	__type(value, __u64);
} kept_apps SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, SERVERS_MAX);
	__type(key, __u32);
	__type(value, __u64);
} kept_backends SEC(".maps");

/* By the cookie of a socket its place in its map: of a client, of a backend, and SERVERS_MAX more than that of an application. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * CLIENTS_MAX + SERVERS_MAX);
	__type(key, __u64);
	__type(value, __u32);
} kept_places SEC(".maps");

struct kept_request {
	__u32 length;
	__u64 words[KEPT_BYTES / 8];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CLIENTS_MAX);
	__type(key, __u32);
	__type(value, struct kept_request);
} kept_requests SEC(".maps");

struct kept_server {
	__u32 client;  /* whom it serves */
	__u32 answers; /* while what it brings along goes ahead of an answer: whom that is for, plus 1; else 0 */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SERVERS_MAX);
	__type(key, __u32);
	__type(value, struct kept_server);
} kept_servers SEC(".maps");

/* Bit: place of a server that takes part. User space adds them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} kept_joined SEC(".maps");

struct kept_pool {
	struct bpf_spin_lock lock;
	__u32 begin; /* of the queue */
	__u32 end;
	__u64 busy; /* bit: place of a server that serves a client */
	__u32 queue[CLIENTS_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct kept_pool);
} kept_pools SEC(".maps");

static __always_inline struct kept_pool *the_pool(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&kept_pools, &zero);
}

/* An idle server for this client: its place, or SERVERS_MAX; then the client waits, if it may. */
static __always_inline __u32 take(struct kept_pool *pool, __u32 client, __u32 waits)
{
	__u32 zero = 0, found = SERVERS_MAX;
	struct kept_server *server;
	__u64 *word = bpf_map_lookup_elem(&kept_joined, &zero);
	__u64 joined, idle;

	if (!word)
		return SERVERS_MAX;
	joined = *(volatile __u64 *)word;
	/* Most that find none do so without the lock. */
	if (!waits && !(joined & ~*(volatile __u64 *)&pool->busy))
		return SERVERS_MAX;
	bpf_spin_lock(&pool->lock);
	idle = joined & ~pool->busy;
	if (idle) {
		found = lowest_bit(idle);
		pool->busy |= idle & -idle;
	} else if (waits) {
		pool->queue[pool->end & (CLIENTS_MAX - 1)] = client;
		pool->end++;
	}
	bpf_spin_unlock(&pool->lock);
	server = bpf_map_lookup_elem(&kept_servers, &found);
	if (server)
		server->client = client;
	return found;
}

/* What comes to a client's connection here. */
SEC("sk_skb/verdict")
int keep_skb(struct __sk_buff *skb)
{
	__u64 cookie = bpf_get_socket_cookie(skb);
	__u32 *place, client, server, n = skb->len;
	struct kept_request *request;
	struct kept_pool *pool = the_pool();
	__u8 type;

	if (!n || !pool)
		return SK_PASS;
	place = bpf_map_lookup_elem(&kept_places, &cookie);
	if (!place)
		return SK_PASS;
	client = *place;
	if (!bpf_skb_load_bytes(skb, 0, &type, 1) && type == 'X')
		return SK_DROP; /* Terminate: no server is to end */
	server = take(pool, client, 0);
	if (server >= SERVERS_MAX) {
		request = bpf_map_lookup_elem(&kept_requests, &client);
		if (!request || n > KEPT_BYTES)
			return SK_PASS;
		/* Before the client is in the queue: from there on the request is a server's. */
		request->length = n;
		if (bpf_skb_load_bytes(skb, 0, request->words, n))
			return SK_PASS;
		server = take(pool, client, 1);
	}
	if (server >= SERVERS_MAX)
		return SK_DROP;
	return bpf_sk_redirect_map(skb, &kept_backends, server, BPF_F_INGRESS);
}

struct store {
	struct sk_msg_md *msg;
	const __u64 *words;
	__u32 length;
};

/* A word of a kept request, or what is left at its end, to where there is room for it in a message. */
static long store_step(__u32 i, void *context)
{
	struct store *store = context;
	__u32 off = i * 8;
	__u8 *to = (__u8 *)store->msg->data + off;
	__u64 word;

	if (i >= KEPT_BYTES / 8)
		return 1;
	word = store->words[i];
	if (off + 8 <= store->length) {
		if (to + 8 > (__u8 *)store->msg->data_end)
			return 1;
		*(__u64 *)to = word;
		return 0;
	}
	for (__u32 j = 0; j < 7; j++) {
		if (off + j >= store->length || to + j + 1 > (__u8 *)store->msg->data_end)
			return 1;
		to[j] = word;
		word >>= 8;
	}
	return 1;
}

/* What an application says, of those in kept_apps. It goes by TCP, and keep_skb has it, where no server is idle and where it may be Terminate. */
static __always_inline int ask(struct sk_msg_md *msg, struct kept_pool *pool, __u32 client)
{
	__u32 server;

	if (msg->size == 5)
		return SK_PASS;
	server = take(pool, client, 0);
	if (server >= SERVERS_MAX)
		return SK_PASS;
	return bpf_msg_redirect_map(msg, &kept_backends, server, BPF_F_INGRESS);
}

static __always_inline int answer(struct sk_msg_md *msg, __u32 client)
{
	if (both_ways)
		return bpf_msg_redirect_map(msg, &kept_apps, client, BPF_F_INGRESS);
	return bpf_msg_redirect_map(msg, &kept_clients, client, 0);
}

/* What a backend answers, or an application asks. */
SEC("sk_msg")
int keep_msg(struct sk_msg_md *msg)
{
	struct bpf_sock *sk = msg->sk;
	struct tcp_sock *sender = sk ? bpf_skc_to_tcp_sock(sk) : NULL;
	struct kept_request *request = NULL;
	struct store store = { .msg = msg };
	struct kept_server *server;
	struct kept_pool *pool = the_pool();
	__u32 *place, at, client, next = CLIENTS_MAX;
	__u64 cookie;

	if (!sender || !pool)
		return SK_PASS;
	cookie = sender->inet_conn.icsk_inet.sk.__sk_common.skc_cookie.counter;
	place = bpf_map_lookup_elem(&kept_places, &cookie);
	if (!place)
		return SK_PASS;
	at = *place;
	if (both_ways && at >= SERVERS_MAX)
		return ask(msg, pool, at - SERVERS_MAX);
	server = bpf_map_lookup_elem(&kept_servers, &at);
	if (!server)
		return SK_PASS;
	if (server->answers) { /* what it brings along has gone ahead */
		client = server->answers - 1;
		server->answers = 0;
		bpf_msg_apply_bytes(msg, 0); /* the kernel keeps what was said last */
		return answer(msg, client);
	}
	client = server->client;
	bpf_spin_lock(&pool->lock);
	if (pool->begin != pool->end) {
		next = pool->queue[pool->begin & (CLIENTS_MAX - 1)];
		pool->begin++;
	} else {
		pool->busy &= ~(1ULL << (at & (SERVERS_MAX - 1)));
	}
	bpf_spin_unlock(&pool->lock);
	if (next < CLIENTS_MAX)
		request = bpf_map_lookup_elem(&kept_requests, &next);
	if (!request)
		return answer(msg, client);
	server->client = next;
	/* Without memory for that the send fails, and with it the backend. */
	if (bpf_msg_push_data(msg, 0, request->length, 0) || bpf_msg_pull_data(msg, 0, request->length, 0))
		return SK_DROP;
	store.words = request->words;
	store.length = request->length;
	bpf_loop(KEPT_BYTES / 8, store_step, &store, 0);
	server->answers = client + 1;
	bpf_msg_apply_bytes(msg, request->length);
	return bpf_msg_redirect_map(msg, &kept_backends, at, BPF_F_INGRESS);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
