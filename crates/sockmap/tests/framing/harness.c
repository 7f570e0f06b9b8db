// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * wire.bpf.h as a plain program. Input, little-endian: cases of { u32 chunks; { u32 size; bytes }... }. Output: one
 * line per message head, then the state at the end of the case. Each chunk is its own allocation, so that the address
 * sanitizer sees every byte too many.
 */
#include <linux/types.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct chunk {
	__u8 *bytes;
	__u32 size;
};

static int load(const struct chunk *chunk, __u32 off, void *to, __u32 n)
{
	if (n < 1 || off + n > chunk->size)
		return -1;
	memcpy(to, chunk->bytes + off, n);
	return 0;
}

#define WIRE_LOAD(chunk, off, to, n)   load(chunk, off, to, n)
#define WIRE_LOAD_N(chunk, off, to, n) load(chunk, off, to, n)
#include "wire.bpf.h"

/* Returns 1 when the stream is bad. */
static int walk(struct wire_state *w, const struct chunk *chunk)
{
	__u32 off = 0;

	for (;;) {
		struct wire_msg m = {};
		int result = WIRE_NEXT(w, chunk, off, chunk->size, 1u << 30, &m);

		if (result == WIRE_END)
			return 0;
		if (result == WIRE_BAD)
			return 1;
		printf("%u %u %u\n", m.type, m.length, m.status);
	}
}

int main(void)
{
	__u32 chunks;

	while (fread(&chunks, 4, 1, stdin) == 1) {
		struct wire_state w = {};
		int bad = 0;

		for (__u32 i = 0; i < chunks; i++) {
			struct chunk chunk;

			if (fread(&chunk.size, 4, 1, stdin) != 1)
				return 2;
			chunk.bytes = malloc(chunk.size ? chunk.size : 1);
			if (!chunk.bytes || (chunk.size && fread(chunk.bytes, chunk.size, 1, stdin) != 1))
				return 2;
			if (!bad)
				bad = walk(&w, &chunk);
			free(chunk.bytes);
		}
		if (bad)
			printf("bad\n");
		else
			printf("end %u %u\n", w.need, w.hdr_len);
	}
	return 0;
}
