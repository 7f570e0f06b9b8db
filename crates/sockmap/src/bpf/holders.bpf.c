// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which processes hold the sockets with the wanted inodes: an iterator over all open files of one process, or of all that the reader's
 * pid namespace shows. /proc/PID/fd tells the same, but another user's only to CAP_DAC_READ_SEARCH, which would open every file of the host.
 */
#include "kernel.bpf.h"
#include "holders.h"

/* Connections in one walk. */
#define WANTED_MAX 4096

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
} KERNEL_STRUCT;

struct upid {
	int nr;
} KERNEL_STRUCT;

struct pid {
	unsigned int level; /* of the innermost namespace */
	struct upid numbers[];
} KERNEL_STRUCT;

/* enum pid_type, include/linux/pid_types.h */
#define PIDTYPE_TGID 1

struct signal_struct {
	struct pid *pids[4];
} KERNEL_STRUCT;

struct task_struct {
	struct pid *thread_pid;
	struct signal_struct *signal;
} KERNEL_STRUCT;

struct inode {
	unsigned long i_ino;
} KERNEL_STRUCT;

struct file {
	struct inode *f_inode;
} KERNEL_STRUCT;

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
} KERNEL_STRUCT;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, WANTED_MAX);
	__type(key, __u64); /* inode */
	__type(value, __u32);
} wanted SEC(".maps");

SEC("iter/task_file")
int socket_holders(struct bpf_iter__task_file *ctx)
{
	struct task_struct *task = ctx->task, *reader = (void *)bpf_get_current_task();
	struct file *file = ctx->file;
	struct holder found = {};
	unsigned int level;
	struct pid *pid;

	if (!task || !file || !bpf_sock_from_file(file))
		return 0;
	found.inode = BPF_CORE_READ(file, f_inode, i_ino);
	if (!bpf_map_lookup_elem(&wanted, &found.inode))
		return 0;
	/* The number that the process has where the reader is. */
	level = BPF_CORE_READ(reader, thread_pid, level);
	pid = BPF_CORE_READ(task, signal, pids[PIDTYPE_TGID]);
	bpf_core_read(&found.pid, sizeof(found.pid), &pid->numbers[level].nr);
	found.fd = ctx->fd;
	bpf_seq_write(ctx->meta->seq, &found, sizeof(found));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
