// SPDX-License-Identifier: Apache-2.0
//! Names of reasons and counters, generated from the tables in `bpf/lanes.h`.

include!(concat!(env!("OUT_DIR"), "/names.rs"));
