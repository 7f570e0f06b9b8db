// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* wire.bpf.h alone: one line per message head, then the state at the end of the stream. */
#include <string.h>

#include "framing.h"

static int load(const struct piece *piece, __u32 off, void *to, __u32 n)
{
	if (n < 1 || off + n > piece->size)
		return -1;
	memcpy(to, piece->bytes + off, n);
	return 0;
}

#define WIRE_LOAD(piece, off, to, n)   load(piece, off, to, n)
#define WIRE_LOAD_N(piece, off, to, n) load(piece, off, to, n)
#include "wire.bpf.h"

static struct wire_state state;

void frames_begin(void)
{
	memset(&state, 0, sizeof(state));
}

int frames_piece(const struct piece *piece)
{
	__u32 off = 0;

	for (;;) {
		struct wire_msg m = {};
		int result = WIRE_NEXT(&state, piece, off, piece->size, 1u << 30, &m);

		if (result == WIRE_END)
			return 0;
		if (result == WIRE_BAD)
			return 1;
		say("%u %u %u\n", m.type, m.length, m.status);
	}
}

void frames_end(int bad)
{
	if (bad)
		say("bad\n");
	else
		say("end %u %u\n", state.need, state.hdr_len);
}
