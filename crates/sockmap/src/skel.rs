// SPDX-License-Identifier: Apache-2.0
//! The generated skeleton of `bpf/lanes.bpf.c` and, from its BTF, the layout of the shared state.
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
