/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The few kernel structures that the programs read, with CO-RE relocation, and shims for newer features.
 *
 * Only the fields named here are relied upon; a kernel without one of them fails to load the program, which
 * the self-test reports. No vmlinux.h: nothing else of the kernel is our business.
 */
#ifndef KERNEL_BPF_H
#define KERNEL_BPF_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define KERNEL_STRUCT __attribute__((preserve_access_index))

typedef struct {
	__s64 counter;
} atomic64_t;

typedef struct {
	int counter;
} atomic_t;

typedef struct {
	atomic_t refs;
} refcount_t;

struct sock_common {
	atomic64_t skc_cookie; /* assigned at the first request for a cookie, never changed */
	volatile unsigned char skc_state; /* TCP_ESTABLISHED, ... */
} KERNEL_STRUCT;

struct sock {
	struct sock_common __sk_common;
	int sk_wmem_queued; /* bytes of truesize in the send queue */
	int sk_sndbuf;
	int sk_err;	  /* pending error: the next call on the socket fails */
	__u8 sk_shutdown; /* RCV_SHUTDOWN, SEND_SHUTDOWN */
	void *sk_user_data; /* the psock, low bits are flags */
	int sk_rcvlowat;    /* a recv() waits for so many bytes */
	struct {
		atomic_t rmem_alloc; /* bytes charged for what waits to be read */
	} KERNEL_STRUCT sk_backlog;
} KERNEL_STRUCT;

struct inet_sock {
	struct sock sk;
} KERNEL_STRUCT;

struct inet_connection_sock {
	struct inet_sock icsk_inet;
} KERNEL_STRUCT;

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u32 write_seq;   /* end of what was enqueued for sending */
	__u32 copied_seq;  /* end of what the process has read */
	__u32 rcv_nxt;	   /* end of what was received */
	__u32 snd_una;	   /* end of what was acknowledged */
	__u64 bytes_acked; /* grows by exactly what snd_una grows */
} KERNEL_STRUCT;

struct sk_buff_head {
	__u32 qlen;
} KERNEL_STRUCT;

struct sk_buff {
	char cb[48]; /* each layer's own; TCP's while the segment is in a socket's queue */
} KERNEL_STRUCT;

struct tcp_skb_cb {
	__u32 seq; /* of the segment's first byte */
} KERNEL_STRUCT;

struct sk_psock_progs {
	struct bpf_prog *stream_verdict;
	struct bpf_prog *skb_verdict;
} KERNEL_STRUCT;

struct sk_psock {
	struct sk_psock_progs progs;
	struct sk_buff_head ingress_skb; /* redirected to this socket, not yet taken by the worker */
	refcount_t refcnt;		 /* one for each map, one for each send(), recv() or worker that is under way */
} KERNEL_STRUCT;

/* include/net/tcp_states.h, include/net/sock.h */
#define TCP_ESTABLISHED 1
#define TCP_CLOSE_WAIT 8
#define SEND_SHUTDOWN 2

/* SK_USER_DATA_PTRMASK, include/net/sock.h */
#define PSOCK_POINTER_MASK (~7ULL)

/* Linux 6.2, commit a35b9af4ec2c: reads of the result are checked like bpf_probe_read_kernel. */
extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym __weak;

#endif /* KERNEL_BPF_H */
