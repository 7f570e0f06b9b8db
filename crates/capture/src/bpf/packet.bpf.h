/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Source "packets": TCP segments of the server's port, at the cgroup hooks of IP input and output.
 *
 * Called for every packet of every socket below the cgroup, before TCP processes input and after it has made output, under
 * no lock of the socket. Only the server's own sockets count (local port), so a connection on loopback, which passes the
 * hooks of both ends, is recorded once. Always lets the packet pass. At most PACKET_EVENTS_MAX events a packet.
 */
#ifndef PACKET_BPF_H
#define PACKET_BPF_H

#include "capture.bpf.h"

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define IPPROTO_TCP 6
/* Extension headers of IPv6, which may stand before TCP; RFC 8200 has four kinds and one of them twice. */
#define IPPROTO_HOPOPTS 0
#define IPPROTO_ROUTING 43
#define IPPROTO_DSTOPTS 60
#define IPV6_EXTENSIONS_MAX 6
#define PASS 1

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4

/* What is remembered of a connection, in the socket. */
struct connection {
	__u64 cookie;
	__u32 decided;	  /* CONNECTION_* */
	__u32 responded;  /* response bytes recorded since the last request byte */
	__u32 requests;   /* segments with request bytes, saturating */
	__u32 responses;  /* segments with response bytes, saturating */
	__u32 next[2];	  /* by direction, behind the last byte that passed: valid after the first segment */
};

#define CONNECTION_OURS 1u	/* of the right network namespace */
#define CONNECTION_FOREIGN 2u
#define CONNECTION_ENCRYPTED 4u /* its bytes are left to the probes */
#define CONNECTION_ASKED 8u	/* SSLRequest or GSSENCRequest was sent */
#define CONNECTION_TLS_FRONTEND 16u /* a segment of either direction looked like a TLS record */
#define CONNECTION_TLS_BACKEND 32u
#define CONNECTION_TURNING 64u	/* user space has yet to be told of the encryption */

/* Segments of either direction that are searched for signs of encryption. */
#define LOOK_SEGMENTS 8

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct connection);
} connections SEC(".maps");

struct tcp_header {
	__be16 source;
	__be16 dest;
	__be32 seq;
	__be32 ack_seq;
	__u8 offset; /* high nibble: words of the header */
	__u8 flags;
	__be16 window;
};

#define LOAD_SKB(to, at, n) bpf_skb_load_bytes(skb, from + at, to, n)

static __always_inline int copy_packet(struct __sk_buff *skb, struct bpf_dynptr *ptr, __u32 from, __u32 left)
{
	COPY_BYTES(ptr, left, LOAD_SKB);
}

/* One event with `head->len` payload bytes from offset `from` of the packet. Returns 0, or -1 when it is lost. */
__noinline int record_packet(struct __sk_buff *skb, const struct event_head *head, __u32 from)
{
	struct bpf_dynptr ptr;
	void *ring;
	__u32 len;

	if (!head)
		return -1;
	len = head->len;
	if (len > EVENT_BYTES_MAX)
		return -1;
	ring = ring_for(head->remote_port);
	if (!ring)
		return -1;
	RECORD_SMALL(ring, head, len, LOAD_SKB, -1);
	if (is_full(ring, event_size(len)))
		return -1;
	if (bpf_ringbuf_reserve_dynptr(ring, event_size(len), 0, &ptr) ||
	    bpf_dynptr_write(&ptr, 0, (void *)head, sizeof(*head), 0) || copy_packet(skb, &ptr, from, len)) {
		bpf_ringbuf_discard_dynptr(&ptr, BPF_RB_NO_WAKEUP);
		return -1;
	}
	bpf_ringbuf_submit_dynptr(&ptr, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Where TCP begins, behind the header of IPv6, whose field "next header" is given; 0 when it does not. Fragments are whole here. */
static __always_inline __u32 tcp_behind_extensions(struct __sk_buff *skb, __u8 next)
{
	__u32 at = 40;

	for (__u32 i = 0; i < IPV6_EXTENSIONS_MAX && next != IPPROTO_TCP; i++) {
		__u8 extension[2]; /* next header; length in units of 8 bytes, without the first */

		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS)
			return 0;
		if (bpf_skb_load_bytes(skb, at, extension, sizeof(extension)))
			return 0;
		next = extension[0];
		at += (extension[1] + 1) * 8;
	}
	return next == IPPROTO_TCP ? at : 0;
}

static __always_inline void take_tcp(struct event_head *head, const struct tcp_header *tcp, __u32 direction)
{
	head->remote_port = bpf_ntohs(direction == DIRECTION_FRONTEND ? tcp->source : tcp->dest);
	head->local_port = bpf_ntohs(direction == DIRECTION_FRONTEND ? tcp->dest : tcp->source);
	head->seq = bpf_ntohl(tcp->seq);
	head->ack = bpf_ntohl(tcp->ack_seq);
	head->tcp_flags = tcp->flags;
}

static __always_inline void take_ipv4(struct event_head *head, const __u8 *ip, __u32 direction)
{
	head->family = AF_INET;
	__builtin_memcpy(direction == DIRECTION_FRONTEND ? head->remote : head->local, ip + 12, 4);
	__builtin_memcpy(direction == DIRECTION_FRONTEND ? head->local : head->remote, ip + 16, 4);
}

/* What parse() does, for nearly all packets: IPv4 without options, its headers in the linear part. Without a call of the kernel. */
static __always_inline __u32 parse_usual(struct __sk_buff *skb, struct event_head *head, __u32 direction)
{
	struct {
		__u8 ip[20];
		struct tcp_header tcp;
	} *packet = (void *)(long)skb->data;

	if ((void *)(packet + 1) > (void *)(long)skb->data_end || packet->ip[0] != 0x45 || packet->ip[9] != IPPROTO_TCP)
		return 0;
	take_ipv4(head, packet->ip, direction);
	take_tcp(head, &packet->tcp, direction);
	return sizeof(packet->ip) + (packet->tcp.offset >> 4) * 4;
}

/* Addresses, ports and TCP fields of the packet, seen from the server. Returns the length of all headers, 0 if it is not TCP. */
static __always_inline __u32 parse(struct __sk_buff *skb, struct event_head *head, __u32 direction)
{
	struct tcp_header tcp;
	__u32 ip_len;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		__u8 ip[20];

		if (bpf_skb_load_bytes(skb, 0, ip, sizeof(ip)) || ip[9] != IPPROTO_TCP)
			return 0;
		ip_len = (ip[0] & 15) * 4;
		take_ipv4(head, ip, direction);
	} else {
		__u8 ip[40];

		if (skb->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, 0, ip, sizeof(ip)))
			return 0;
		ip_len = tcp_behind_extensions(skb, ip[6]);
		if (ip_len == 0)
			return 0;
		head->family = AF_INET6;
		__builtin_memcpy(direction == DIRECTION_FRONTEND ? head->remote : head->local, ip + 8, 16);
		__builtin_memcpy(direction == DIRECTION_FRONTEND ? head->local : head->remote, ip + 24, 16);
	}
	if (bpf_skb_load_bytes(skb, ip_len, &tcp, sizeof(tcp)))
		return 0;
	take_tcp(head, &tcp, direction);
	return ip_len + (tcp.offset >> 4) * 4;
}

static __always_inline int is_tls_record(const __u8 *bytes)
{
	return bytes[0] >= 0x14 && bytes[0] <= 0x17 && bytes[1] == 3 && bytes[2] <= 4;
}

/* One TLS record that fills the segment: what two messages of MySQL's would have to look like in both directions by chance. */
static __always_inline int is_whole_tls_record(const __u8 *bytes, __u32 payload)
{
	return is_tls_record(bytes) && payload == 5 + ((__u32)bytes[3] << 8 | bytes[4]);
}

/*
 * The sign of encryption of MariaDB and MySQL: the client's first packet is 32 bytes of login with CLIENT_SSL and nothing more,
 * number 1. A connection that was joined must look like TLS in both directions.
 */
static __always_inline __u32 mysql_encryption(const __u8 *bytes, __u32 direction, __u32 requests, __u32 payload)
{
	if (direction == DIRECTION_BACKEND)
		return is_whole_tls_record(bytes, payload) ? CONNECTION_TLS_BACKEND : 0;
	if (requests == 0 && payload >= 36 && bytes[0] == 32 && bytes[1] == 0 && bytes[2] == 0 && bytes[3] == 1 &&
	    (bytes[5] & 8))
		return CONNECTION_ENCRYPTED;
	return is_whole_tls_record(bytes, payload) ? CONNECTION_TLS_FRONTEND : 0;
}

/*
 * Notices encryption. A new connection asks for it in eight bytes and is answered by one, or begins with a TLS handshake
 * record (PostgreSQL 17, sslnegotiation = direct). One that was joined must look like TLS in both directions: a part of a
 * binary message may look so by chance in one.
 */
static __always_inline void look_for_encryption(struct __sk_buff *skb, struct connection *connection,
						struct event_head *head, __u32 from, __u32 payload)
{
	__u8 bytes[8] = {};
	__u32 flag = 0;

	if (payload >= 8) {
		if (bpf_skb_load_bytes(skb, from, bytes, 8))
			return;
	} else if (payload != 1 || bpf_skb_load_bytes(skb, from, bytes, 1)) {
		return;
	}
	if (server_mysql) {
		if (payload >= 8)
			flag = mysql_encryption(bytes, head->direction, connection->requests, payload);
	} else if (head->direction == DIRECTION_FRONTEND) {
		/* Length 8, then 1234 and 5679 (SSLRequest) or 5680 (GSSENCRequest). */
		if (payload == 8 && bytes[3] == 8 && bytes[4] == 0x04 && bytes[5] == 0xd2 && bytes[6] == 0x16 &&
		    (bytes[7] == 0x2f || bytes[7] == 0x30))
			flag = CONNECTION_ASKED;
		else if (payload >= 8 && is_tls_record(bytes))
			flag = connection->requests == 0 && bytes[0] == 0x16 ? CONNECTION_ENCRYPTED :
									     CONNECTION_TLS_FRONTEND;
	} else if (payload == 1 && (bytes[0] == 'S' || bytes[0] == 'G') && (connection->decided & CONNECTION_ASKED)) {
		flag = CONNECTION_ENCRYPTED;
	} else if (payload >= 8 && is_tls_record(bytes)) {
		flag = CONNECTION_TLS_BACKEND;
	}
	if (flag == 0)
		return;
	__sync_fetch_and_or(&connection->decided, flag);
	flag = connection->decided;
	if ((flag & CONNECTION_ENCRYPTED) ||
	    (flag & (CONNECTION_TLS_FRONTEND | CONNECTION_TLS_BACKEND)) ==
		    (CONNECTION_TLS_FRONTEND | CONNECTION_TLS_BACKEND)) {
		struct peer_key key = { .remote_port = head->remote_port, .local_port = head->local_port };

		__builtin_memcpy(key.remote, head->remote, sizeof(key.remote));
		bpf_map_update_elem(&encrypted, &key, &head->ts_ns, BPF_ANY);
		__sync_fetch_and_or(&connection->decided, CONNECTION_ENCRYPTED | CONNECTION_TURNING);
	}
}

/* How many bytes at the front are left out by the response level. */
static __always_inline __u32 response_skip(struct connection *connection, __u32 payload)
{
	__u32 responded = connection->responded;

	if (response_whole_bytes == RESPONSE_ALL)
		return 0;
	if (responded + payload <= response_whole_bytes && responded + payload >= responded) {
		connection->responded = responded + payload;
		return 0;
	}
	connection->responded = response_whole_bytes;
	return payload > response_tail_bytes ? payload - response_tail_bytes : 0;
}

/* Counts what has passed before: TCP sends again what a full socket has refused, and it passes the hook a second time. */
static __always_inline void count_again(struct connection *connection, const struct event_head *head, __u32 payload,
					__u32 seen, struct capture_counters *account)
{
	__u32 *next = &connection->next[head->direction == DIRECTION_BACKEND];
	__u32 end = head->seq + payload;
	__s32 below = *next - head->seq;

	if (seen > 0 && below > 0)
		count(&account->again, below < (__s32)payload ? below : payload);
	if (seen == 0 || (__s32)(end - *next) > 0)
		*next = end;
}

static __always_inline int foreign(struct bpf_sock *sk)
{
	struct sock___capture *kernel_sock;

	if (server_netns == 0)
		return 0;
	kernel_sock = (void *)bpf_skc_to_tcp_sock(sk);
	return !kernel_sock || kernel_sock->__sk_common.skc_net.net->ns.inum != server_netns;
}

static __always_inline int packet(struct __sk_buff *skb, __u32 direction)
{
	struct event_head head = { .kind = EVENT_PACKET, .direction = direction };
	struct connection *connection = NULL;
	struct capture_counters *account;
	struct bpf_sock *sk = skb->sk;
	__u32 from, payload, skip = 0, seen;

	if (!sk || sk->src_port != server_port)
		return PASS;
	if (sk->state == TCP_LISTEN)
		head.flags = EVENT_LISTENS;
	else
		connection = bpf_sk_storage_get(&connections, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!connection || !(connection->decided & (CONNECTION_OURS | CONNECTION_FOREIGN))) {
		__u32 is_foreign;

		/* None for the request socket of a handshake, which carries no payload. */
		sk = bpf_sk_fullsock(sk);
		if (!sk || sk->protocol != IPPROTO_TCP)
			return PASS;
		is_foreign = foreign(sk);
		if (connection) {
			connection->cookie = bpf_get_socket_cookie(skb);
			__sync_fetch_and_or(&connection->decided, is_foreign ? CONNECTION_FOREIGN : CONNECTION_OURS);
		} else if (is_foreign) {
			return PASS;
		}
	}
	if (connection && (connection->decided & CONNECTION_FOREIGN))
		return PASS;

	from = parse_usual(skb, &head, direction);
	if (from == 0)
		from = parse(skb, &head, direction);
	if (from == 0 || skb->len < from) {
		/* Not understood: whatever it holds is missing from the trace. */
		account = counters_of(0, direction);
		if (account) {
			count(&account->seen, skb->len);
			count(&account->fault, skb->len);
		}
		return PASS;
	}
	/* One that begins a connection comes to a socket that listens. TCP refuses any other, late or forged: it must not end what is recorded. */
	if (connection && direction == DIRECTION_FRONTEND && (head.tcp_flags & TCP_SYN))
		return PASS;
	payload = skb->len - from;
	if (payload == 0 && !(head.tcp_flags & (TCP_FIN | TCP_SYN | TCP_RST)))
		return PASS;
	head.ts_ns = bpf_ktime_get_ns();
	head.cookie = connection ? connection->cookie : bpf_get_socket_cookie(skb);
	if (payload == 0) {
		send_head(&head, head.remote_port);
		return PASS;
	}

	account = counters_of(0, direction);
	if (!account)
		return PASS;
	count(&account->seen, payload);
	if (connection) {
		if ((connection->decided & CONNECTION_ENCRYPTED) && !(connection->decided & CONNECTION_TURNING)) {
			count(&account->filtered, payload);
			if (head.tcp_flags & (TCP_FIN | TCP_RST))
				send_head(&head, head.remote_port);
			return PASS;
		}
		seen = direction == DIRECTION_FRONTEND ? connection->requests : connection->responses;
		count_again(connection, &head, payload, seen, account);
		if (seen < LOOK_SEGMENTS)
			look_for_encryption(skb, connection, &head, from, payload);
		if (direction == DIRECTION_FRONTEND) {
			connection->requests = seen + (seen < LOOK_SEGMENTS);
			connection->responded = 0;
		} else {
			connection->responses = seen + (seen < LOOK_SEGMENTS);
			skip = response_skip(connection, payload);
		}
		if (connection->decided & CONNECTION_TURNING) {
			struct event_head turn = head;

			turn.kind = EVENT_TLS;
			send_head(&turn, head.remote_port);
			__sync_fetch_and_and(&connection->decided, ~CONNECTION_TURNING);
		}
	}
	if (skip == payload) {
		count(&account->filtered, skip);
		return PASS;
	}

	head.skipped = skip;
	payload -= skip;
	from += skip;
	head.seq += skip + ((head.tcp_flags & TCP_SYN) ? 1 : 0);
	for (__u32 i = 0; i < PACKET_EVENTS_MAX; i++) {
		__u32 piece = payload > EVENT_BYTES_MAX ? EVENT_BYTES_MAX : payload;

		head.len = piece;
		/* Without the event nobody knows that bytes before it were left out: they are a part of its hole. */
		if (record_packet(skb, &head, from)) {
			count(&account->lost, head.skipped + piece);
		} else {
			count(&account->recorded, piece);
			if (head.skipped)
				__sync_fetch_and_add(&account->filtered.bytes, head.skipped);
		}
		payload -= piece;
		if (payload == 0)
			break;
		from += piece;
		head.seq += piece;
		head.skipped = 0;
	}
	if (payload > 0)
		count(&account->fault, payload);
	return PASS;
}

SEC("cgroup_skb/ingress")
int packet_in(struct __sk_buff *skb)
{
	return packet(skb, DIRECTION_FRONTEND);
}

SEC("cgroup_skb/egress")
int packet_out(struct __sk_buff *skb)
{
	return packet(skb, DIRECTION_BACKEND);
}

static __always_inline void forget_encryption(const struct event_head *head)
{
	struct peer_key key = { .remote_port = head->remote_port, .local_port = head->local_port };

	__builtin_memcpy(key.remote, head->remote, sizeof(key.remote));
	unmap_address(key.remote);
	bpf_map_delete_elem(&encrypted, &key);
}

/* Whether our FIN is among what was sent: it is the last that is ever queued, and is queued in these states. */
static __always_inline int fin_sent(struct tcp_sock___capture *tcp, __u64 state)
{
	return (state == TCP_FIN_WAIT1 || state == TCP_FIN_WAIT2 || state == TCP_CLOSING || state == TCP_LAST_ACK) &&
	       BPF_CORE_READ(tcp, snd_nxt) == BPF_CORE_READ(tcp, write_seq);
}

/* The audit: what the kernel itself counted, when a socket of the server's port is closed. Arguments: sock, old, new state. */
SEC("raw_tp/inet_sock_set_state")
int socket_state(struct bpf_raw_tracepoint_args *ctx)
{
	struct event_head head = { .kind = EVENT_CLOSE };
	struct tcp_sock___capture *tcp = (void *)ctx->args[0];
	struct inet_sock___capture *inet = (void *)ctx->args[0];
	struct sock___capture *sk = (void *)ctx->args[0];

	if (ctx->args[2] != TCP_CLOSE || ctx->args[1] == TCP_LISTEN)
		return 0;
	/* skc_num is 0 by now, the port has been given back. */
	if (BPF_CORE_READ(inet, inet_sport) != bpf_htons(server_port) || BPF_CORE_READ(sk, sk_protocol) != IPPROTO_TCP)
		return 0;
	if (server_netns != 0 && BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum) != server_netns)
		return 0;
	head.ts_ns = bpf_ktime_get_ns();
	head.cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);
	/* Two packets of a client may each make the handshake's child; the one that is too late has had no packet, and ends nothing. */
	if (ctx->args[1] == TCP_SYN_RECV && head.cookie == 0)
		return 0;
	head.family = BPF_CORE_READ(sk, __sk_common.skc_family);
	head.local_port = server_port;
	head.remote_port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	if (head.family == AF_INET) {
		BPF_CORE_READ_INTO((__u32 *)head.remote, sk, __sk_common.skc_daddr);
		BPF_CORE_READ_INTO((__u32 *)head.local, sk, __sk_common.skc_rcv_saddr);
	} else {
		BPF_CORE_READ_INTO(&head.remote, sk, __sk_common.skc_v6_daddr.in6_u.u6_addr8);
		BPF_CORE_READ_INTO(&head.local, sk, __sk_common.skc_v6_rcv_saddr.in6_u.u6_addr8);
	}
	head.seq = BPF_CORE_READ(tcp, rcv_nxt);
	head.ack = BPF_CORE_READ(tcp, snd_nxt);
	head.offset = BPF_CORE_READ(tcp, bytes_received);
	if (BPF_CORE_READ(sk, __sk_common.skc_flags) & (1ul << SOCK_DONE))
		head.flags |= EVENT_FIN_RECEIVED;
	if (fin_sent(tcp, ctx->args[1]))
		head.flags |= EVENT_FIN_SENT;
	/* The next connection with these ends may be plain text. */
	forget_encryption(&head);
	send_head(&head, head.remote_port);
	return 0;
}

#endif /* PACKET_BPF_H */
