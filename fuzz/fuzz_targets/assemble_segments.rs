// SPDX-License-Identifier: Apache-2.0
//! See `underpass_trace::assemble::fuzzing::segments`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_trace::assemble::fuzzing::segments(data));
