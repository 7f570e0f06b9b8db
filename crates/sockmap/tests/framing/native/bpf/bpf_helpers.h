/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What libbpf's header of this name gives to programs, for a build of them that runs in a process: helpers are plain functions, which
 * lanes.c defines for one client, one server and one pool.
 */
#ifndef BPF_HELPERS_H
#define BPF_HELPERS_H

#include <stddef.h>

#define SEC(name)
#define __ksym
#define __weak __attribute__((weak))
#define __uint(name, value) int (*name)[value]
#define __type(name, value) typeof(value) *name
#define __array(name, value) typeof(value) *name[1]
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#define __noinline __attribute__((noinline))
#define barrier_var(var) asm volatile("" : "+r"(var))
/* An attribute that compilers for processors do not know. */
#define preserve_access_index

void *bpf_map_lookup_elem(const void *map, const void *key);
long bpf_loop(__u32 rounds, long (*step)(__u32 i, void *context), void *context, __u64 flags);
__u64 bpf_ktime_get_ns(void);
__u32 bpf_get_prandom_u32(void);
__u64 bpf_get_current_pid_tgid(void);
long bpf_probe_read_kernel(void *to, __u32 n, const void *from);

long bpf_skb_load_bytes(const void *skb, __u32 off, void *to, __u32 n);
long bpf_skb_store_bytes(struct __sk_buff *skb, __u32 off, const void *from, __u32 n, __u64 flags);
long bpf_skb_pull_data(struct __sk_buff *skb, __u32 n);
long bpf_skb_adjust_room(struct __sk_buff *skb, __s32 n, __u32 mode, __u64 flags);
__u64 bpf_get_socket_cookie(void *context);
long bpf_sk_redirect_map(struct __sk_buff *skb, const void *map, __u32 key, __u64 flags);

long bpf_msg_pull_data(struct sk_msg_md *msg, __u32 begin, __u32 end, __u64 flags);
long bpf_msg_push_data(struct sk_msg_md *msg, __u32 begin, __u32 length, __u64 flags);
long bpf_msg_apply_bytes(struct sk_msg_md *msg, __u32 bytes);
long bpf_tail_call(void *context, const void *programs, __u32 index);
long bpf_msg_redirect_map(struct sk_msg_md *msg, const void *map, __u32 key, __u64 flags);
long bpf_msg_redirect_hash(struct sk_msg_md *msg, const void *map, const void *key, __u64 flags);

struct tcp_sock *bpf_skc_to_tcp_sock(void *sk);
void *bpf_sk_storage_get(const void *map, void *sk, void *value, __u64 flags);
long bpf_sk_release(void *sk);

void *bpf_ringbuf_reserve(const void *ring, __u64 size, __u64 flags);
void bpf_ringbuf_submit(void *data, __u64 flags);
void bpf_ringbuf_discard(void *data, __u64 flags);
__u64 bpf_ringbuf_query(const void *ring, __u64 flags);

#endif /* BPF_HELPERS_H */
