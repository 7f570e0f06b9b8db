// SPDX-License-Identifier: Apache-2.0
//! See `underpass_pool::fuzzing::link`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| underpass_pool::fuzzing::link(data));
