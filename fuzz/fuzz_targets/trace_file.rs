// SPDX-License-Identifier: Apache-2.0
//! See `underpass_trace::fuzzing::file`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_trace::fuzzing::file(data));
