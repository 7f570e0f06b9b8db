/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What holders.bpf.c tells user space. */
#ifndef HOLDERS_H
#define HOLDERS_H

struct holder {
	__u64 inode;
	__s32 pid; /* in the reader's pid namespace */
	__u32 fd;
};

#endif /* HOLDERS_H */
