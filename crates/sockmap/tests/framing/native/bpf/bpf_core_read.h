/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* As bpf_helpers.h beside it: a process has no other kernel's structures to look into. */
#ifndef BPF_CORE_READ_H
#define BPF_CORE_READ_H

#define bpf_core_type_id_kernel(type) 0
#define bpf_core_field_offset(type, field) __builtin_offsetof(type, field)

#endif /* BPF_CORE_READ_H */
