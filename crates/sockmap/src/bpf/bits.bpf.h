/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What machines have an instruction for and BPF has not. */
#ifndef BITS_BPF_H
#define BITS_BPF_H

/* Number of the lowest set bit, without branches: the verifier would walk each path. */
static __always_inline __u32 lowest_bit(__u64 word)
{
	__u64 below = ~word & (word - 1);

	below = below - ((below >> 1) & 0x5555555555555555ULL);
	below = (below & 0x3333333333333333ULL) + ((below >> 2) & 0x3333333333333333ULL);
	below = (below + (below >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return below * 0x0101010101010101ULL >> 56;
}

#endif /* BITS_BPF_H */
