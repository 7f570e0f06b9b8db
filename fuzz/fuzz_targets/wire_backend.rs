// SPDX-License-Identifier: Apache-2.0
//! See `underpass_wire::fuzzing::backend`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_wire::fuzzing::backend(data));
