// SPDX-License-Identifier: Apache-2.0
//! The generated skeletons: `bpf/lanes.bpf.c` with, from its BTF, the layout of the shared state, and those of programs beside them.
#![allow(
    unsafe_code,
    missing_docs,
    clippy::all,
    unused_qualifications,
    rust_2018_idioms,
    unreachable_pub,
    dead_code
)]
#![allow(clippy::undocumented_unsafe_blocks)]

include!(concat!(env!("OUT_DIR"), "/lanes.skel.rs"));

/// The skeleton of `bpf/holders.bpf.c`.
pub(crate) mod holders {
    include!(concat!(env!("OUT_DIR"), "/holders.skel.rs"));
}

/// The skeleton of `bpf/forward.bpf.c`, whose types would meet those of the lanes.
pub(crate) mod forward {
    include!(concat!(env!("OUT_DIR"), "/forward.skel.rs"));
}

/// The skeleton of `bpf/kept.bpf.c`, likewise.
pub(crate) mod kept {
    include!(concat!(env!("OUT_DIR"), "/kept.skel.rs"));
}
