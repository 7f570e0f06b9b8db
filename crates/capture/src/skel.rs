// SPDX-License-Identifier: Apache-2.0
//! The generated skeleton of `bpf/capture.bpf.c` and, from its BTF, the layout of events and accounts.
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

include!(concat!(env!("OUT_DIR"), "/capture.skel.rs"));
