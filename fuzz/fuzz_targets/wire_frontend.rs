// SPDX-License-Identifier: Apache-2.0
//! See `underpass_wire::fuzzing::frontend`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_wire::fuzzing::frontend(data));
